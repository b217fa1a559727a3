"""Whatever the log or a process does, a client holds nothing that the log does not."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
import redis

from bench.relay.link import RelayLink
from orchestrator.store.encoding import TOKEN_BYTES, pack_outcomes, pack_tokens
from orchestrator.store.scripts import session_keys
from specwire.core.messages import FinishReason, Outcome
from tests.faults.parts import ROOT, ServiceProcess
from tests.faults.stack import PLAIN, Stack, read_log
from tests.faults.streams import PROMPT, Stream, plain
from tests.orchestrator.redis_for_tests import RedisServer
from tests.ports import free_port
from tests.wait import eventually

LONG = 4000
# Longer than the orchestrator waits for one answer of the log, so that appends of unknown outcome are repeated.
PAUSE_S = 2.5
# A target step takes 8 ms here.
QUIET_S = 1.0

LEAVING = f"""
import sys
from specwire.client import Chunk, Client, Started
for event in Client(sys.argv[1], patience=0).generate({PROMPT}, max_tokens={LONG}, ignore_eos=True):
    if isinstance(event, Started):
        print(event.session_id, flush=True)
    if isinstance(event, Chunk) and event.position > 50:
        print("streaming", flush=True)
"""


@pytest.mark.parametrize("kept", [False, True], ids=["empty", "behind"])
def test_a_log_that_was_lost_is_written_again_from_its_owners_memory(healthy: Stack, kept: bool) -> None:
    with healthy.generate(600, request_id=f"lost-{kept}") as stream:
        stream.until(60)
        if kept:
            healthy.redis.save()
        stream.until(200)
        healthy.redis.stop()
        stream.until_quiet(QUIET_S)
        healthy.redis.start()
        stream.check_whole(plain(PLAIN, 600))
    stream.check_logged(healthy.log(stream.session_id))
    with healthy.generate(600, request_id=f"lost-{kept}") as again:
        assert again.rest() == stream.tokens
        assert again.session_id == stream.session_id


def test_a_log_lost_while_the_text_stands_still_is_written_again(healthy: Stack) -> None:
    """The lease is what notices it: no append does."""
    with healthy.generate(200) as stream:
        stream.until(50)
        healthy.verifier.send(signal.SIGSTOP)
        stream.until_quiet(QUIET_S)
        healthy.redis.stop()
        healthy.redis.start()
        with redis.Redis(unix_socket_path=str(healthy.redis.socket)) as client:
            assert eventually(lambda: client.exists(session_keys(stream.session_id)[0]))
        assert list(healthy.log(stream.session_id).tokens) == stream.tokens
        healthy.verifier.send(signal.SIGCONT)
        assert stream.rest() == plain(PLAIN, 200)


def test_acknowledgements_that_are_cut_off_lose_and_repeat_nothing(healthy: Stack) -> None:
    chance = random.Random(5)
    with relayed_log(healthy) as (serving, apart, line):
        with Stream(serving.address, max_tokens=500) as stream:
            for _ in range(8):
                stream.until(len(stream.tokens) + chance.randrange(1, 40))
                line.cut(chance.choice([0.0, 0.05, 0.5]))
            stream.check_whole(plain(PLAIN, 500))
        stream.check_logged(read_log(apart.url, stream.session_id))


@contextmanager
def relayed_log(healthy: Stack) -> Iterator[tuple[ServiceProcess, RedisServer, RelayLink]]:
    """An orchestrator of its own, its log, and the line between them."""
    with RedisServer(port=free_port()) as apart, RelayLink(apart.tcp) as line:
        peers = ("--verifier", healthy.verifier.address)
        serving = healthy.parts.start("orchestrate", *peers, "--redis-url", f"redis://{line.address}")
        serving.ready()
        yield serving, apart, line
        serving.kill()


def test_where_the_log_went_another_way_it_wins(healthy: Stack) -> None:
    with healthy.generate(300) as stream:
        stream.until(100)
        forge(healthy, stream.session_id, token=63)
        stream.rest()
        assert stream.finished is not None
    log = healthy.log(stream.session_id)
    assert list(log.tokens) == stream.tokens
    assert len(stream.tokens) == 300
    strange = next(i for i, token in enumerate(plain(PLAIN, 300)) if token != stream.tokens[i])
    assert stream.tokens[strange] == 63
    text = (*PROMPT, *stream.tokens[: strange + 1])
    assert stream.tokens[strange + 1 :] == plain(PLAIN, 300 - strange - 1, text)


def test_a_log_that_contradicts_what_was_shown_is_data_loss(healthy: Stack) -> None:
    with healthy.generate(300) as stream:
        stream.until(100)
        forge(healthy, stream.session_id, token=63, at=len(PROMPT) + 50)
        stream.failure(grpc.StatusCode.DATA_LOSS)
    assert stream.tokens == plain(PLAIN, len(stream.tokens))


def forge(stack: Stack, session_id: str, token: int, at: int | None = None) -> None:
    """Add a token behind the log's end that its owner knows nothing of; put another `at` a position that it has."""
    _, tokens, outcomes = session_keys(session_id)
    with redis.Redis(unix_socket_path=str(stack.redis.socket)) as client:
        pipeline = client.pipeline(transaction=True)
        if at is not None:
            pipeline.setrange(tokens, TOKEN_BYTES * at, pack_tokens([token]))
        pipeline.append(tokens, pack_tokens([token]))
        pipeline.append(outcomes, pack_outcomes([Outcome.DIRECT]))
        pipeline.execute()


def test_a_session_that_cannot_be_logged_does_not_begin(healthy: Stack) -> None:
    healthy.redis.pause()
    with healthy.generate(20) as refused:
        assert "log" in refused.failure()
    with healthy.generate(20, request_id="of-a-paused-log") as bound:
        assert "log" in bound.failure()
    healthy.redis.resume()
    assert refused.tokens == bound.tokens == []


@pytest.mark.parametrize("seed", [1, 2])
def test_a_killed_orchestrator_had_shown_nothing_but_the_log(healthy: Stack, seed: int) -> None:
    with healthy.generate(LONG) as stream:
        stream.until(random.Random(seed).randrange(20, 200))
        healthy.orchestrator.kill()
        stream.failure()
    log = healthy.log(stream.session_id)
    assert list(log.tokens[: len(stream.tokens)]) == stream.tokens
    assert list(log.tokens) == plain(PLAIN, LONG)[: len(log.tokens)]
    assert log.reason is None


def test_a_client_that_vanishes_ends_its_session(healthy: Stack) -> None:
    command = [sys.executable, "-c", LEAVING, healthy.orchestrator.address]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None
            session_id = client.stdout.readline().strip()
            assert client.stdout.readline() == "streaming\n"
        finally:
            client.kill()
    assert ended(healthy, session_id) is FinishReason.CANCELLED
    log = healthy.log(session_id)
    assert list(log.tokens) == plain(PLAIN, LONG)[: len(log.tokens)]


def test_one_client_leaves_and_the_other_goes_on(healthy: Stack) -> None:
    with healthy.generate(300) as stays:
        with healthy.generate(LONG) as leaves:
            stays.until(30)
            leaves.until(30)
        assert stays.rest() == plain(PLAIN, 300)


def ended(stack: Stack, session_id: str) -> FinishReason | None:
    """Why the session ended, by its log; asked for again until it says, for a reader would keep the session alive."""
    eventually(lambda: stack.log(session_id).reason is not None)
    return stack.log(session_id).reason


def test_sigterm_while_text_streams(healthy: Stack) -> None:
    with healthy.generate(LONG) as stream:
        stream.until(50)
        healthy.orchestrator.send(signal.SIGTERM)
        stream.rest()
        assert healthy.orchestrator.wait() == 0
    if stream.finished is not None:
        assert stream.finished.reason is FinishReason.CANCELLED
    else:
        assert stream.error is not None
        assert stream.error.code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
    log = healthy.log(stream.session_id)
    assert list(log.tokens[: len(stream.tokens)]) == stream.tokens
    assert log.reason is FinishReason.ERROR
    assert healthy.orchestrator.process.pid not in healthy.parts.living()
    assert "Traceback" not in healthy.orchestrator.said()


def test_sigterm_leaves_a_session_that_can_be_asked_for_again_as_it_is(healthy: Stack) -> None:
    with healthy.generate(LONG, request_id="left-at-a-shutdown") as stream:
        stream.until(50)
        healthy.orchestrator.send(signal.SIGTERM)
        stream.failure()
        assert healthy.orchestrator.wait() == 0
    log = healthy.log(stream.session_id)
    assert log.reason is None
    assert list(log.tokens[: len(stream.tokens)]) == stream.tokens
    assert list(log.tokens) == plain(PLAIN, LONG)[: len(log.tokens)]


def test_a_line_to_the_log_that_breaks_between_two_sessions(healthy: Stack) -> None:
    """What nobody used meanwhile is broken; that is no answer to who comes next."""
    with relayed_log(healthy) as (serving, _, line):
        for _ in range(3):
            with Stream(serving.address, max_tokens=20) as stream:
                assert stream.rest() == plain(PLAIN, 20), stream.error
            line.cut(0.0)
