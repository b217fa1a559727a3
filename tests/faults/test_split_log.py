"""Two orchestrators that both believe a session is theirs, over a Redis that has lost who is right."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from specwire.v1 import generation_pb2, generation_pb2_grpc
from tests.faults.stack import PLAIN, Stack
from tests.faults.streams import LIMIT_S, Stream, plain
from tests.wait import eventually

LENGTH = 2400


@pytest.mark.parametrize("kept", [False, True], ids=["empty", "from before the claim"])
def test_the_newest_fence_wins(healthy: Stack, kept: bool) -> None:
    """The former owner wakes up to a log that knows nothing of its successor, and has no lasting say all the same."""
    second = healthy.orchestrate(healthy.drafter.address)
    second.ready()
    with Stream(healthy.orchestrator.address, max_tokens=LENGTH) as former, ThreadPoolExecutor(1) as pool:
        former.until(50)
        if kept:
            healthy.redis.save()
        before = healthy.log(former.session_id)
        healthy.orchestrator.send(signal.SIGSTOP)
        try:
            present = pool.submit(taken_over, second.address, former.session_id)
            assert eventually(lambda: healthy.logged(former.session_id) >= before.length + 100)
            healthy.redis.stop()
            healthy.redis.start()
        finally:
            healthy.orchestrator.send(signal.SIGCONT)
        assert present.result(2 * LIMIT_S) == plain(PLAIN, LENGTH)
        former.rest()
    assert former.tokens == plain(PLAIN, LENGTH)[: len(former.tokens)]
    log = healthy.log(former.session_id)
    assert list(log.tokens) == plain(PLAIN, LENGTH)
    assert log.reason is not None
    assert log.fence > before.fence
    assert "Traceback" not in healthy.orchestrator.said() + second.said()
    second.kill()


def taken_over(address: str, session_id: str) -> list[int]:
    """The tokens of a stream that claims the session."""
    with grpc.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.WatchRequest(session_id=session_id, take_over=True)
        events = list(stub.Watch(request, timeout=2 * LIMIT_S))
    assert events[-1].WhichOneof("event") == "finished"
    return [token for event in events for token in event.chunk.tokens]
