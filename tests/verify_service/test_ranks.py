"""A verifier over several processes fails as a whole, and leaves nothing behind.

vLLM, which splits its model, is not needed: each rank has a whole one, or notes what it is told.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from bench.harness.child import descendants
from specwire.core.model import VLLM, Feed, ModelError, ModelLost, RankGroup
from specwire.lm import load_model
from specwire.lm.kv_cache import CachedLM
from specwire.lm.runners.vllm import LeadingRunner
from specwire.rpc.server_options import ModelServiceOptions
from specwire.v1 import verify_pb2
from tests.verify_service.other_rank import NotingRunner
from tests.verify_service.peer import connected
from tests.wait import eventually, lives, until
from verify_service.ranks import Ranks
from verify_service.server import start

PATIENCE_S = 120.0
PROMPT = [5, 17, 80, 3]


def load_split(spec: str, slots: int, ranks: RankGroup, **_: object) -> CachedLM:
    """Rank 0 of a model of which the others have nothing."""
    ranks.meet()
    whole = load_model(spec, slots=slots)
    assert isinstance(whole, CachedLM)
    return CachedLM(LeadingRunner(whole.runner, ranks), whole.info, whole.slots)


async def test_a_rank_that_dies_ends_the_verifier(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sessions hear that they may go on elsewhere."""
    monkeypatch.setattr("verify_service.ranks.MODULE", "tests.verify_service.idle_rank")
    monkeypatch.setattr("specwire.lm.load_model", load_split)
    before = set(descendants(os.getpid()))
    running = await start(ModelServiceOptions(str(llama), slots=1, engine=VLLM, tensor_parallel_size=2))
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


def test_another_rank_does_what_the_first_does_until_it_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verify_service.ranks.MODULE", "tests.verify_service.other_rank")
    own, its = tmp_path / "own", tmp_path / "its"
    before = set(descendants(os.getpid()))
    ranks = Ranks(2, {"spec": str(its)})
    try:
        ranks.meet()
        (other,) = set(descendants(os.getpid())) - before
        os.kill(other, signal.SIGTERM)  # what is meant for the whole verifier is rank 0's to heed
        leading = LeadingRunner(NotingRunner(own), ranks)
        assert leading.kv_bytes == 2 * NotingRunner.kv_bytes
        leading.run([Feed(3, 17, (5, 6, 7), 2), Feed(0, 0, (1 << 40,), 0)])
        leading.zero(2, 9)
        leading.copy(1, 0, 4)
        assert eventually(lambda: its.exists() and its.read_text() == own.read_text())
        assert own.read_text().count("\n") == 3
        os.kill(other, signal.SIGKILL)
        with pytest.raises(ModelLost, match=r"^rank 1 of 2 ended by SIGKILL$"):
            while True:
                leading.run([Feed(1, 4, (7,), 1)])
    finally:
        ranks.close()
    assert eventually(lambda: not lives(other))


def test_a_failed_forward_ends_the_model_on_all_ranks(idle: tuple[Ranks, set[int]], tmp_path: Path) -> None:
    ranks, _ = idle
    leading = LeadingRunner(NotingRunner(tmp_path), ranks)  # a folder, which takes no notes
    with pytest.raises(ModelLost, match=r"^3 ranks failed together: .*Is a directory"):
        leading.run([Feed(1, 4, (7,), 1)])


def test_a_rank_that_cannot_load_says_why() -> None:
    ranks = Ranks(2, {"spec": "scripted:3", "slots": 0, "engine": VLLM})
    try:
        with pytest.raises(ConnectionError, match=r"^rank 1 of 2: slots: must be at least 1, not 0$"):
            ranks.meet()
    finally:
        ranks.close()


def test_what_a_model_fails_of_is_what_became_of_the_other_rank(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the connection between ranks that broke with it."""
    ranks = Ranks(2, {"spec": "scripted:3", "slots": 0, "engine": VLLM})
    monkeypatch.setattr("specwire.lm.pretrained.load_in_vllm", lambda *_: ranks.meet())
    try:
        with pytest.raises(ConnectionError):
            load_model(str(llama), slots=1, engine=VLLM, ranks=ranks)
        monkeypatch.setattr("specwire.lm.pretrained.load_in_vllm", lambda *_: 1 // 0)
        with pytest.raises(ModelError, match=r"^tensor-parallel-size: rank 1 of 2: slots: must be at least 1, not 0$"):
            load_model(str(llama), slots=1, engine=VLLM, ranks=ranks)
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("spec", "options", "reason"),
    [
        ("scripted:3", {"engine": VLLM}, "tensor-parallel-size: a scripted model cannot be split over 2 ranks"),
        ("llama", {}, "tensor-parallel-size: is vLLM's, and goes with --engine vllm only, not 2"),
    ],
)
def test_what_is_not_split_is_refused_before_any_process_is_started(
    spec: str, options: dict[str, str], reason: str
) -> None:
    with pytest.raises(ModelError, match=f"^{reason}$"):
        load_model(spec, slots=1, ranks=Ranks(2), **options)  # type: ignore[arg-type]  # by name
