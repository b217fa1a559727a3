"""The orchestrator that serves a text dies, hangs or leaves: another goes on with it, and the client sees one text."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from orchestrator.store import StoredSession
from specwire.client import Chunk, Client, Started
from specwire.core.messages import FinishReason
from specwire.v1 import generation_pb2, generation_pb2_grpc
from tests.faults.parts import ServiceProcess
from tests.faults.stack import PLAIN, Stack
from tests.faults.streams import LIMIT_S, PROMPT, Stream, plain
from tests.wait import eventually

LENGTH = 600
PATIENCE_S = 120.0
# Of an orphan, beyond the call's own time: until its owner cannot come back, and until it is missed
# (docs/RELIABILITY.md, the times).
ORPHANED_S = 120.0


@pytest.fixture(scope="module")
def second(running_stack: Stack) -> Iterator[ServiceProcess]:
    """Another orchestrator with the same log, verifier and drafter."""
    other = running_stack.orchestrate(running_stack.drafter.address)
    other.ready()
    yield other
    other.kill()


def both(healthy: Stack, second: ServiceProcess) -> list[str]:
    return [healthy.orchestrator.address, second.address]


def test_the_end_of_the_text_survives(healthy: Stack, second: ServiceProcess) -> None:
    """A stop string is found across the place where the text changed hands, max_tokens and the offsets hold."""
    expected = plain(PLAIN, LENGTH)
    text = " ".join(map(str, expected))
    stop = " ".join(map(str, expected[200:206]))
    cut = text.index(stop)
    with Stream(both(healthy, second), patience=PATIENCE_S, max_tokens=LENGTH, stop=[stop]) as stream:
        stream.until(150)
        healthy.orchestrator.kill()
        stream.rest()
    assert stream.text == text[:cut]
    assert stream.finished is not None
    assert (stream.finished.reason, stream.finished.text_length) == (FinishReason.STOP_STRING, cut)


def test_split_brain(healthy: Stack, second: ServiceProcess) -> None:
    """One is stopped with a reader of its own, and wakes up while another one drives the session: it has no say."""
    long = 3 * LENGTH
    with Stream(healthy.orchestrator.address, max_tokens=long) as stays, ThreadPoolExecutor(1) as pool:
        stays.until(50)
        before = healthy.log(stays.session_id)
        healthy.orchestrator.send(signal.SIGSTOP)
        try:
            taking = pool.submit(take_over, second.address, stays.session_id)
            assert eventually(lambda: healthy.logged(stays.session_id) >= before.length + 200)
        finally:
            healthy.orchestrator.send(signal.SIGCONT)
        stays.check_whole(plain(PLAIN, long))
        assert stays.finished is not None
        assert stays.finished.text_length == len(stays.text)
        stays.check_logged(healthy.log(stays.session_id))
        taking.result(LIMIT_S)
    assert healthy.log(stays.session_id).fence > before.fence
    assert "Traceback" not in healthy.orchestrator.said()


def take_over(address: str, session_id: str) -> list[int]:
    """As a client does that has lost its connection to another orchestrator; reads to the end."""
    with grpc.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.WatchRequest(session_id=session_id, take_over=True)
        events = list(stub.Watch(request, timeout=2 * LIMIT_S))
    assert events[-1].WhichOneof("event") == "finished"
    return [token for event in events for token in event.chunk.tokens]


def test_nobody_is_left(healthy: Stack) -> None:
    """The client says so, and why, once its patience has ended; the log keeps the session for later."""
    with Stream(healthy.orchestrator.address, patience=2.0, max_tokens=LENGTH) as stream:
        stream.until(100)
        healthy.orchestrator.kill()
        stream.failure()
    healthy.mend()
    with Client(healthy.orchestrator.address) as client:
        events = list(client.watch(stream.session_id, 3 + len(stream.tokens)))
    tokens = [token for event in events if isinstance(event, Chunk) for token in event.tokens]
    assert stream.tokens + tokens == plain(PLAIN, LENGTH)


def test_the_command_line_takes_several_addresses(healthy: Stack, second: ServiceProcess) -> None:
    gone = healthy.orchestrator.address
    healthy.orchestrator.kill()
    ask = ("-m", "deploy", "generate", "5 6 7", "--max-tokens", "20", "--ignore-eos", "--json")
    code, out, said = healthy.parts.run(*ask, "--address", f"{gone},{second.address}")
    assert (code, json.loads(out)["tokens"]) == (0, plain(PLAIN, 20)), said
    code, out, said = healthy.parts.run(*ask, "--address", gone)
    assert (code, out) == (1, "")
    assert f"cannot connect to {gone}" in said


@pytest.mark.parametrize("kept", [False, True], ids=["empty", "from before the claim"])
def test_the_newest_fence_wins(healthy: Stack, kept: bool) -> None:
    """The former owner wakes up to a Redis that knows nothing of its successor, and has no lasting say all the same."""
    second = healthy.orchestrate(healthy.drafter.address)
    second.ready()
    with Stream(healthy.orchestrator.address, max_tokens=4 * LENGTH) as former, ThreadPoolExecutor(1) as pool:
        former.until(50)
        if kept:
            healthy.redis.save()
        before = healthy.log(former.session_id)
        healthy.orchestrator.send(signal.SIGSTOP)
        try:
            present = pool.submit(take_over, second.address, former.session_id)
            assert eventually(lambda: healthy.logged(former.session_id) >= before.length + 100)
            healthy.redis.stop()
            healthy.redis.start()
        finally:
            healthy.orchestrator.send(signal.SIGCONT)
        assert present.result(2 * LIMIT_S) == plain(PLAIN, 4 * LENGTH)
        former.rest()
    assert former.tokens == plain(PLAIN, 4 * LENGTH)[: len(former.tokens)]
    log = healthy.log(former.session_id)
    assert list(log.tokens) == plain(PLAIN, 4 * LENGTH)
    assert log.reason is not None
    assert log.fence > before.fence
    assert "Traceback" not in healthy.orchestrator.said() + second.said()
    second.kill()


@pytest.mark.whole_matrix
@pytest.mark.parametrize(
    ("timeout", "reason"),
    [(4.0, FinishReason.DEADLINE), (300.0, FinishReason.CANCELLED)],
    ids=["at its deadline", "as nobody comes back"],
)
def test_a_killed_orchestrators_session_ends(healthy: Stack, timeout: float, reason: FinishReason) -> None:
    other = healthy.orchestrate(healthy.drafter.address)
    try:
        other.ready()
        with Client(healthy.orchestrator.address, patience=0.0) as client:
            name = f"orphan: {reason.name}"
            events = client.generate(PROMPT, max_tokens=4000, ignore_eos=True, request_id=name, timeout=timeout)
            started = next(events)
            assert isinstance(started, Started)
            next(events)
            healthy.orchestrator.kill()
        log = ended(healthy, started.session_id)
        assert log.reason is reason
        assert list(log.tokens) == plain(PLAIN, len(log.tokens))
        assert log.text_length == len(" ".join(map(str, log.tokens)))
    finally:
        other.kill()


def ended(healthy: Stack, session_id: str) -> StoredSession:
    assert eventually(lambda: healthy.log(session_id).reason is not None, ORPHANED_S, pause_s=0.5), (
        "it still runs in the log"
    )
    return healthy.log(session_id)
