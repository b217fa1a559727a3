"""Drafters and verifiers die, hang and come back while text streams; the text is the target's."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from specwire.client import Chunk, Client
from tests.faults.stack import PLAIN, Stack
from tests.faults.streams import LIMIT_S, plain

LONG = 4000


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "drained"])
def test_a_verifier_is_replaced_mid_sentence(healthy: Stack, number: signal.Signals) -> None:
    length = 2000  # beside other work a drafter does not pay, and is only tried now and then
    with healthy.generate(length) as stream:
        stream.until(60)
        healthy.verifier.send(number)
        healthy.verifier.wait()
        healthy.verifier.restart()
        healthy.verifier.ready()
        stream.until_accepted()  # the drafter serves the new verifier too
        stream.check_whole(plain(PLAIN, length))


def test_both_peers_at_once(healthy: Stack) -> None:
    with healthy.generate(400) as stream:
        stream.until(100)
        healthy.drafter.kill()
        healthy.verifier.kill()
        healthy.drafter.restart()
        healthy.verifier.restart()
        stream.check_whole(plain(PLAIN, 400))
        healthy.drafter.ready()


# What stays away for longer than a session waits: its stream ends with a status, and it goes on once that is back.

AWAY_LENGTH = 400
# By what is away: what takes it away, what brings it back, and what the status says.
PARTIES: dict[str, tuple[Callable[[Stack], None], Callable[[Stack], object], str]] = {
    "the log": (lambda stack: stack.redis.end(), lambda stack: stack.redis.start(), "session log"),
    "the verifier": (lambda stack: stack.verifier.kill(), lambda stack: back(stack), "verifier"),
}


def back(healthy: Stack) -> None:
    healthy.verifier.restart()
    healthy.verifier.ready()


@pytest.mark.whole_matrix
@pytest.mark.parametrize("who", PARTIES)
def test_a_stream_ends_unavailable_and_its_session_goes_on(healthy: Stack, who: str) -> None:
    """Behind what the orchestrator waits for, 30 s, nobody is told a token that the log lacks."""
    leave, return_, said = PARTIES[who]
    with healthy.generate(AWAY_LENGTH, request_id=f"away: {who}") as stream:
        stream.until(60)
        leave(healthy)
        assert said in stream.failure()
    shown = stream.tokens
    assert shown == plain(PLAIN, AWAY_LENGTH)[: len(shown)]
    assert len(shown) < AWAY_LENGTH
    return_(healthy)
    log = healthy.log(stream.session_id)
    assert log.reason is None
    assert list(log.tokens[: len(shown)]) == shown
    assert watched(healthy, stream.session_id) == plain(PLAIN, AWAY_LENGTH)
    assert list(healthy.log(stream.session_id).tokens) == plain(PLAIN, AWAY_LENGTH)
    assert "Traceback" not in healthy.orchestrator.said()


def watched(healthy: Stack, session_id: str) -> list[int]:
    """All tokens of a session, for a reader who waits until it can go on."""
    with Client(healthy.orchestrator.address, patience=LIMIT_S) as client:
        events = client.watch(session_id, timeout=2 * LIMIT_S)
        return [token for event in events if isinstance(event, Chunk) for token in event.tokens]
