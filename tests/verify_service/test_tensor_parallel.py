"""A verifier over two processes is one verifier: it answers, stops and fails as a whole, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from deploy.processes import descendants
from specwire.core.sampling import InvalidParameter
from specwire.lm import Feed, LanguageModel, load_model
from specwire.rpc.process import ModelServiceOptions
from specwire.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from tests.verify_service.peer import Peer, connected
from verify_service.ranks import Ranks
from verify_service.server import start

PATIENCE_S = 45.0
PROMPT, COUNT = [5, 17, 80, 3], 24


@asynccontextmanager
async def verifier(llama: Path) -> AsyncIterator[tuple[Process, str, int]]:
    """A verifier of its own process, its address, and the process of its other rank."""
    command = [sys.executable, "-m", "verify_service", str(llama), "--tensor-parallel-size=2", "--json"]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            ready = json.loads(await process.stdout.readline())
        (other,) = descendants(process.pid)
        yield process, ready["address"], other
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def until_gone(*pids: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while any(_lives(pid) for pid in pids):  # noqa: ASYNC110 # nothing tells of others' processes
            await asyncio.sleep(0.02)


def _lives(pid: int) -> bool:
    """A zombie that nobody has waited for yet does not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def test_serves_and_ends_on_a_signal_with_its_other_rank(llama: Path) -> None:
    one = load_model(str(llama), slots=1, threads=1)
    async with verifier(llama) as (process, address, other):
        async with grpc.aio.insecure_channel(address) as channel:
            stub = verify_pb2_grpc.VerifyServiceStub(channel)
            info = await stub.GetModelInfo(common_pb2.GetModelInfoRequest(), timeout=PATIENCE_S)
            assert info.weights_fingerprint == one.info.weights_fingerprint
            assert info.kv_bytes == info.slots * one.kv_bytes
            call = stub.Connect()
            peer = Peer(call, info)
            await peer.open(1, PROMPT, stopping=common_pb2.Stopping(max_tokens=COUNT))
            await peer.until_finished(1)
            call.cancel()
        assert peer.tokens[1] == greedy(one, COUNT)
        for pid in (other, process.pid):  # as a supervisor signals all of them
            os.kill(pid, signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0
        await until_gone(other)


async def test_the_other_rank_ends_with_a_verifier_that_is_killed(llama: Path) -> None:
    async with verifier(llama) as (process, _, other):
        process.kill()
        await until_gone(process.pid, other)


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
    await until_gone(other)


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
    await until_gone(*others)
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


def greedy(lm: LanguageModel, count: int) -> list[int]:
    text = list(PROMPT)
    for _ in range(count):
        begin = lm.cached(0)
        text.append(int(lm.forward([Feed(0, begin, text[begin:], 1)]).argmax()))
    return text[len(PROMPT) :]
