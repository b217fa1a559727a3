"""Merging, order, loss of the link, closing; then both ends over a real stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from specwire.rpc import link as module
from specwire.rpc.link import LinkError, Outbox
from specwire.v1 import common_pb2, draft_pb2
from tests.wait import raised

Request = draft_pb2.ConnectDraftRequest


def close(*handles: int) -> Request:
    return Request(closes=[common_pb2.Close(handle=handle) for handle in handles])


def handles(message: Request) -> list[int]:
    return [part.handle for part in message.closes]


class Peer:
    """Records what is written; `reads` cleared is a peer that does not read."""

    def __init__(self) -> None:
        self.received: list[list[int]] = []
        self.failures: list[LinkError] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.error: BaseException | None = None
        self._lost = asyncio.Event()

    async def write(self, message: Request) -> None:
        if self.error:
            raise self.error
        await self.reads.wait()
        self.received.append(handles(message))

    def failed(self, error: LinkError) -> None:
        self.failures.append(error)
        self._lost.set()

    async def lost(self) -> None:
        await asyncio.wait_for(self._lost.wait(), 60.0)

    def outbox(self, **settings: float) -> Outbox[Request]:
        return Outbox(self.write, self.failed, **settings)  # type: ignore[arg-type]  # any field, by name


async def spin(times: int = 10) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


async def test_one_tick_is_one_message_written_in_the_next() -> None:
    peer = Peer()
    outbox = peer.outbox()
    await spin()
    outbox.push(close(1))
    outbox.push(close(2, 3))
    await asyncio.sleep(0)  # wakes the writer
    await asyncio.sleep(0)
    assert peer.received == [[1, 2, 3]]
    outbox.push(close(4))
    await outbox.close()
    assert peer.received == [[1, 2, 3], [4]]


async def test_what_comes_during_a_write_leaves_after_it_in_order() -> None:
    peer = Peer()
    outbox = peer.outbox()
    peer.reads.clear()
    for handle in range(1, 6):
        outbox.push(close(handle))
        await spin(3)
    peer.reads.set()
    await outbox.close()
    assert peer.received == [[1], [2, 3, 4, 5]]


async def test_messages_are_not_merged_beyond_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MERGE_BYTES", 2 * close(1).ByteSize())
    peer = Peer()
    outbox = peer.outbox()
    for handle in range(1, 6):
        outbox.push(close(handle))
    await outbox.close()
    assert peer.received == [[1, 2], [3, 4], [5]]


async def test_a_peer_that_does_not_read_is_a_lost_link() -> None:
    peer = Peer()
    outbox = peer.outbox(stall_s=0.02)
    peer.reads.clear()
    outbox.push(close(1))
    await peer.lost()
    assert "did not read" in str(peer.failures)
    outbox.push(close(2))
    peer.reads.set()
    await outbox.close()
    assert peer.received == []
    assert len(peer.failures) == 1


async def test_a_flood_is_a_lost_link_before_it_is_out_of_memory() -> None:
    peer = Peer()
    outbox = peer.outbox(most_queued=10 * close(1).ByteSize())
    peer.reads.clear()
    for _ in range(100):
        outbox.push(close(1))
    assert len(peer.failures) == 1
    assert "does not read" in str(outbox.failed)
    await outbox.close()


@pytest.mark.parametrize("error", [RuntimeError("gone"), asyncio.CancelledError()])
async def test_a_broken_stream_is_told_once(error: BaseException) -> None:
    peer = Peer()
    outbox = peer.outbox()
    peer.error = error
    outbox.push(close(1))
    await spin()
    outbox.push(close(2))
    await spin()
    assert len(peer.failures) == 1
    await outbox.close()
    assert len(peer.failures) == 1


async def test_closing_flushes_for_a_while_then_gives_up() -> None:
    peer = Peer()
    outbox = peer.outbox()
    peer.reads.clear()
    outbox.push(close(1))
    await outbox.close(flush_s=0.02)
    await outbox.close(flush_s=0.02)
    outbox.push(close(2))
    assert (peer.received, peer.failures) == ([], [])


async def test_a_task_that_closes_may_itself_be_cancelled() -> None:
    peer = Peer()
    outbox = peer.outbox()
    peer.reads.clear()
    outbox.push(close(1))
    closing = asyncio.create_task(outbox.close(flush_s=30))
    await spin()
    closing.cancel()
    await raised(asyncio.CancelledError, closing)
    await outbox.close(flush_s=0)
    assert peer.failures == []


async def test_what_can_wait_goes_out_part_by_part_in_turn_while_nothing_else_is_queued() -> None:
    peer, made = Peer(), []

    def parts(*numbers: int) -> Iterator[Request]:
        for number in numbers:
            made.append(number)
            yield close(number)

    outbox = peer.outbox()
    peer.reads.clear()
    outbox.push_later(parts(11, 12, 13, 14))
    outbox.push_later(parts(21, 22))
    await spin()
    assert made == [11], "the next one is made when this one is written"
    outbox.push(close(1))
    outbox.push(close(2))
    peer.reads.set()
    await spin(40)
    assert peer.received == [[11], [1, 2], [21], [12], [22], [13], [14]]
    outbox.push_later(parts(31))
    await spin()
    peer.reads.clear()
    outbox.push_later(parts(41, 42))
    await spin()
    await outbox.close(flush_s=0.02)
    assert peer.received[-1] == [31]
    outbox.push_later(parts(51))
    await spin()
    assert made[-1] == 41


async def test_parts_that_fail_take_nothing_else_with_them() -> None:
    def parts() -> Iterator[Request]:
        yield close(1)
        raise RuntimeError("a bug")

    peer = Peer()
    outbox = peer.outbox()
    outbox.push_later(parts())
    await spin()
    outbox.push(close(2))
    await outbox.close()
    assert (peer.received, peer.failures) == ([[1], [2]], [])
