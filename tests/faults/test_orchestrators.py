"""The orchestrator that serves a text dies, hangs or leaves: another goes on with it, and the client sees one text."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from bench.relay.link import RelayLink
from specwire.client import Chunk, Client
from specwire.client.requests import RequestOptions
from specwire.core.law.sampling import Sampling
from specwire.core.messages import FinishReason
from specwire.v1 import generation_pb2, generation_pb2_grpc
from tests.faults.parts import ServiceProcess
from tests.faults.stack import PLAIN, Stack
from tests.faults.streams import LIMIT_S, Stream, plain
from tests.wait import eventually

LENGTH = 600
PATIENCE_S = 120.0
# As long as a client needs to notice that nobody answers: see specwire.rpc.channel.
STOPPED_S = 10.0
NOTICED_S = 12.0


@pytest.fixture(scope="module")
def second(running_stack: Stack) -> Iterator[ServiceProcess]:
    """Another orchestrator with the same log, verifier and drafter."""
    other = running_stack.orchestrate(running_stack.drafter.address)
    other.ready()
    yield other
    other.kill()


def both(healthy: Stack, second: ServiceProcess) -> list[str]:
    return [healthy.orchestrator.address, second.address]


def assert_whole(healthy: Stack, stream: Stream, expected: list[int]) -> None:
    """All tokens, each once, the text that they make, and a log that says the same."""
    assert stream.rest() == expected
    assert stream.error is None
    assert stream.text == " ".join(map(str, expected))
    assert stream.finished is not None
    assert stream.finished.reason is FinishReason.LENGTH
    assert stream.finished.text_length == len(stream.text)
    assert stream.finished.stats.output_tokens == len(expected)
    log = healthy.log(stream.session_id)
    assert list(log.tokens) == expected
    assert list(log.outcomes) == stream.outcomes
    assert log.reason is FinishReason.LENGTH


@pytest.mark.parametrize("seed", [1, 2])
def test_killed(healthy: Stack, second: ServiceProcess, seed: int) -> None:
    with Stream(both(healthy, second), patience=PATIENCE_S, max_tokens=LENGTH) as stream:
        stream.until(random.Random(seed).randrange(20, 300))
        healthy.orchestrator.kill()
        assert_whole(healthy, stream, plain(PLAIN, LENGTH))


def test_killed_while_it_samples(healthy: Stack, second: ServiceProcess) -> None:
    sampling = Sampling(temperature=0.9, top_k=20, seed=11)
    addresses = both(healthy, second)
    with Stream(addresses, patience=PATIENCE_S, max_tokens=LENGTH, temperature=0.9, top_k=20, seed=11) as stream:
        stream.until(100)
        healthy.orchestrator.kill()
        assert_whole(healthy, stream, plain(PLAIN, LENGTH, sampling=sampling))


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


def test_left(healthy: Stack, second: ServiceProcess) -> None:
    with Stream(both(healthy, second), patience=PATIENCE_S, max_tokens=LENGTH) as stream:
        stream.until(100)
        healthy.orchestrator.send(signal.SIGTERM)
        assert_whole(healthy, stream, plain(PLAIN, LENGTH))
        assert healthy.orchestrator.wait() == 0


@pytest.mark.whole_matrix
def test_stopped_for_a_while(healthy: Stack, second: ServiceProcess) -> None:
    """The one that wakes up can append nothing, and what its own reader still gets is the log's."""
    long = 3 * LENGTH
    with Stream(both(healthy, second), patience=PATIENCE_S, max_tokens=long) as stream:
        stream.until(100)
        fence = healthy.log(stream.session_id).fence
        healthy.orchestrator.send(signal.SIGSTOP)
        began = time.monotonic()
        stream.until(300)  # by the other one
        assert healthy.log(stream.session_id).fence > fence
        time.sleep(max(0.0, began + STOPPED_S - time.monotonic()))  # how long the fault lasts
        healthy.orchestrator.send(signal.SIGCONT)
        with Client(healthy.orchestrator.address) as client:
            seen = [
                token for event in client.watch(stream.session_id) if isinstance(event, Chunk) for token in event.tokens
            ]
        assert seen == plain(PLAIN, long)
        assert_whole(healthy, stream, plain(PLAIN, long))


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
        assert_whole(healthy, stays, plain(PLAIN, long))
        taking.result(LIMIT_S)
    assert healthy.log(stays.session_id).fence > before.fence
    assert "Traceback" not in healthy.orchestrator.said()


def test_one_request_id_at_two_orchestrators(healthy: Stack, second: ServiceProcess) -> None:
    asked = RequestOptions(max_tokens=LENGTH, request_id="one-at-two")
    with Stream(healthy.orchestrator.address, **asked) as one, Stream(second.address, **asked) as two:
        for stream in (one, two):
            assert_whole(healthy, stream, plain(PLAIN, LENGTH))
    assert one.session_id == two.session_id


def test_taken_from_one_that_runs(healthy: Stack, second: ServiceProcess) -> None:
    """It loses its say at once, and its reader loses nothing."""
    with Stream(healthy.orchestrator.address, max_tokens=LENGTH) as stays:
        stays.until(50)
        fence = healthy.log(stays.session_id).fence
        take_over(second.address, stays.session_id)
        assert_whole(healthy, stays, plain(PLAIN, LENGTH))
    assert healthy.log(stays.session_id).fence > fence


def take_over(address: str, session_id: str) -> None:
    """As a client does that has lost its connection to another orchestrator; reads to the end."""
    with grpc.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.WatchRequest(session_id=session_id, take_over=True)
        last = [response.WhichOneof("event") for response in stub.Watch(request, timeout=LIMIT_S)][-1]
    assert last == "finished"


def test_alone_and_back_again(healthy: Stack) -> None:
    with Stream(healthy.orchestrator.address, patience=PATIENCE_S, max_tokens=LENGTH) as stream:
        stream.until(100)
        healthy.orchestrator.restart()
        healthy.orchestrator.ready()
        assert_whole(healthy, stream, plain(PLAIN, LENGTH))


@pytest.mark.parametrize("fault", ["cut", "cut for a while", pytest.param("stall", marks=pytest.mark.whole_matrix)])
def test_the_clients_own_line(healthy: Stack, fault: str) -> None:
    """The session waits for its reader at the orchestrator that has it, and nobody needs to claim it."""
    length = 2 * LENGTH
    with (
        RelayLink(healthy.orchestrator.address) as link,
        Stream(link.address, patience=PATIENCE_S, max_tokens=length) as stream,
    ):
        stream.until(100)
        fence = healthy.log(stream.session_id).fence
        match fault:
            case "cut":
                link.cut(0.0)
            case "cut for a while":
                link.cut(2.0)
            case _:
                link.stall(NOTICED_S)
        assert_whole(healthy, stream, plain(PLAIN, length))
        assert healthy.log(stream.session_id).fence == fence


@pytest.mark.whole_matrix
def test_a_line_that_hangs_is_left_for_another_address(healthy: Stack, second: ServiceProcess) -> None:
    """Long before it is mended; what the first one went on to write meanwhile is in the log."""
    length = 2 * LENGTH
    with (
        RelayLink(healthy.orchestrator.address) as link,
        Stream([link.address, second.address], patience=PATIENCE_S, max_tokens=length) as stream,
    ):
        stream.until(100)
        link.stall(LIMIT_S)
        assert_whole(healthy, stream, plain(PLAIN, length))


def test_nobody_is_left(healthy: Stack) -> None:
    """The client says so, and why, once its patience has ended; the log keeps the session for later."""
    with Stream(healthy.orchestrator.address, patience=2.0, max_tokens=LENGTH) as stream:
        stream.until(100)
        healthy.orchestrator.kill()
        stream.rest()
    assert stream.error is not None
    assert stream.error.code is grpc.StatusCode.UNAVAILABLE
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
