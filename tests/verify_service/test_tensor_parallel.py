"""A verifier over several processes fails as a whole, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from deploy.stack.processes import descendants
from specwire.core.invalid import InvalidParameter
from specwire.rpc.server_options import ModelServiceOptions
from specwire.v1 import verify_pb2
from tests.verify_service.peer import connected
from tests.wait import lives, until
from verify_service.ranks import Ranks
from verify_service.server import start

PATIENCE_S = 120.0
PROMPT = [5, 17, 80, 3]


async def test_a_rank_that_dies_ends_the_verifier(llama: Path) -> None:
    """Its sessions hear that they may go on elsewhere."""
    before = set(descendants(os.getpid()))
    running = await start(ModelServiceOptions(str(llama), slots=1, tensor_parallel_size=2))
    try:
        (other,) = set(descendants(os.getpid())) - before
        async with connected(running) as peer:
            await peer.open(1, PROMPT, progress=verify_pb2.Progress(credit=len(PROMPT) + 2))
            await peer.receive()
            os.kill(other, signal.SIGKILL)
            async with asyncio.timeout(PATIENCE_S):
                assert await running.failed() == "rank 1 of 2 ended by SIGKILL"
            stopping = asyncio.create_task(running.stop())
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                async with asyncio.timeout(PATIENCE_S):
                    while await peer.call.read():
                        pass
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
            await stopping
    finally:
        await running.stop()
    await until(lambda: not lives(other))


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Ranks, set[int]]]:
    """Two other ranks that compute nothing, and their processes."""
    monkeypatch.setattr("verify_service.ranks.MODULE", "tests.verify_service.idle_rank")
    monkeypatch.setattr("verify_service.ranks.END_LIMIT_S", 0.3)
    ranks, before = Ranks(3), set(descendants(os.getpid()))
    ranks.meet()
    yield ranks, set(descendants(os.getpid())) - before
    ranks.close()


async def test_ranks_that_hang_are_killed(idle: tuple[Ranks, set[int]]) -> None:
    ranks, others = idle
    assert len(others) == 2
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    await asyncio.to_thread(ranks.close)
    await until(lambda: not any(map(lives, others)))
    assert not ranks.lost.done()


async def test_the_loss_of_a_rank_is_told_once_and_who_tells_it_anything_is_refused(
    idle: tuple[Ranks, set[int]],
) -> None:
    ranks, others = idle
    for pid in others:
        os.kill(pid, signal.SIGKILL)
    assert await asyncio.to_thread(ranks.lost.result, PATIENCE_S) in {f"rank {n} of 3 ended by SIGKILL" for n in (1, 2)}
    with pytest.raises(BrokenPipeError):
        ranks.tell(b"x" * (1 << 20))
    ranks.close()
    with pytest.raises(BrokenPipeError):
        ranks.tell(b"x")
    with pytest.raises(BrokenPipeError):
        ranks.meet()


@pytest.mark.parametrize("size", [0, 65])
def test_a_number_of_ranks_that_is_none_is_refused(size: int) -> None:
    with pytest.raises(InvalidParameter, match=f"tensor-parallel-size: must be from 1 to 64, not {size}"):
        ModelServiceOptions("scripted:3", tensor_parallel_size=size)
