"""What a client asks next when its stream breaks, without a service."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest

from specwire.client import Chunk, SamplingInForce, SpecwireError, Started
from specwire.client.stream import MOST_WAIT_S, Attempts, Resumption
from specwire.core.messages import Outcome
from specwire.core.text import hash_of
from specwire.v1 import generation_pb2

PROMPT = (7, 8)
STARTED = Started("s", len(PROMPT), SamplingInForce(0.0, 0, 1.0, 1, "greedy"), 0, hash_of(PROMPT))
BROKEN = SpecwireError(grpc.StatusCode.UNAVAILABLE, "cannot connect to a:1", reached=False)


def chunk(position: int, *tokens: int) -> Chunk:
    return Chunk(position, tokens, (Outcome.DIRECT,) * len(tokens), "", tuple(range(len(tokens))), None, 0)


def attempts(addresses: int = 1, patience: float = 10.0, answered: bool = True) -> Attempts:
    return Attempts(addresses, 0, 100.0, patience, answered)


def waits(known: Attempts, error: SpecwireError = BROKEN) -> list[float]:
    """Every wait until it gives up, time passing by nothing else."""
    now, found = 0.0, []
    with pytest.raises(SpecwireError) as last:
        while True:
            found.append(known.after(error, now))
            now += found[-1]
    assert last.value is error
    return found


def test_what_has_begun_without_a_name_ends_with_its_stream() -> None:
    """A drafter's text: nothing is kept of it, and the same request would begin another one."""
    resumption = Resumption(generation_pb2.GenerateRequest(request_id="r"))
    assert resumption.take(replace(STARTED, session_id="")) is not None
    assert resumption.take(chunk(2, 5, 6)) is not None
    with pytest.raises(SpecwireError) as raised:
        resumption.broke(BROKEN, 10.0)
    assert raised.value is BROKEN


@pytest.mark.parametrize(
    ("request_id", "error", "taken"),
    [
        ("r", SpecwireError(grpc.StatusCode.UNAVAILABLE, "Socket closed"), True),
        ("r", SpecwireError(grpc.StatusCode.CANCELLED, "Received RST_STREAM"), True),
        ("r", BROKEN, False),
        ("r", SpecwireError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", 1.0), False),
        ("", SpecwireError(grpc.StatusCode.UNAVAILABLE, "Socket closed"), False),
    ],
)
def test_a_call_that_was_lost_before_it_had_begun_is_taken_over(
    request_id: str, error: SpecwireError, taken: bool
) -> None:
    """Where nobody was reached, or who was reached has refused it, there is nothing to take over."""
    resumption = Resumption(generation_pb2.GenerateRequest(request_id=request_id))
    resumption.broke(error, 1.0)
    resumption.broke(BROKEN, 1.0)
    assert resumption.request == generation_pb2.GenerateRequest(request_id=request_id, take_over=taken)


def test_a_watch_goes_on_from_its_own_beginning() -> None:
    resumption = Resumption(generation_pb2.WatchRequest(session_id="s", from_position=5, prefix_hash=3))
    resumption.take(STARTED)
    resumption.broke(BROKEN, 1.0)
    assert resumption.request == generation_pb2.WatchRequest(
        session_id="s", from_position=5, prefix_hash=3, take_over=True
    )


def test_without_the_prompts_hash_nothing_is_claimed_of_the_text() -> None:
    resumption = Resumption(generation_pb2.GenerateRequest())
    resumption.take(Started("s", 2, STARTED.sampling, 0))
    resumption.take(chunk(2, 5))
    resumption.broke(BROKEN, 1.0)
    assert resumption.request == generation_pb2.WatchRequest(session_id="s", from_position=3, take_over=True)


@pytest.mark.parametrize("position", [1, 3])
def test_a_gap_or_a_repetition_is_data_loss(position: int) -> None:
    resumption = Resumption(generation_pb2.GenerateRequest())
    resumption.take(STARTED)
    with pytest.raises(SpecwireError, match=f"DATA_LOSS: the service went on at {position}, where 2 was due"):
        resumption.take(chunk(position, 5))


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ABORTED, grpc.StatusCode.RESOURCE_EXHAUSTED]
)
def test_some_errors_end_it(code: grpc.StatusCode) -> None:
    resumption = Resumption(generation_pb2.GenerateRequest())
    resumption.take(STARTED)
    error = SpecwireError(code, "so it is")
    with pytest.raises(SpecwireError) as raised:
        resumption.broke(error, 1.0)
    assert raised.value is error


def test_the_first_reason_is_told_of_what_could_not_go_on() -> None:
    resumption = Resumption(generation_pb2.GenerateRequest())
    resumption.take(STARTED)
    resumption.broke(BROKEN, 1.0)
    resumption.take(STARTED)
    with pytest.raises(SpecwireError, match="UNAVAILABLE: cannot connect to a:1; then NOT_FOUND: no session"):
        resumption.broke(SpecwireError(grpc.StatusCode.NOT_FOUND, "no session"), 1.0)
    with pytest.raises(SpecwireError, match="^DATA_LOSS: other text"):
        resumption.broke(SpecwireError(grpc.StatusCode.DATA_LOSS, "other text"), 1.0)


def test_other_addresses_are_asked_at_once() -> None:
    known = attempts(addresses=3)
    assert [known.after(BROKEN, 0.0) for _ in range(2)] == [0.0, 0.0]
    assert known.current == 2
    assert 0.0 < known.after(BROKEN, 0.0) <= 0.1
    assert known.current == 0


def test_waits_grow_until_patience_ends() -> None:
    found = waits(attempts(patience=10.0))
    assert 10.0 - MOST_WAIT_S < sum(found) <= 10.0
    assert all(wait <= MOST_WAIT_S for wait in found)


def test_the_deadline_bounds_patience() -> None:
    known = Attempts(1, 0, 3.0, 10.0, True)
    assert sum(waits(known)) <= 3.0
    assert known.left(2.5) == 0.5
    with pytest.raises(SpecwireError, match="DEADLINE_EXCEEDED"):
        known.left(3.0)


def test_where_nobody_ever_was_one_round_is_all() -> None:
    assert waits(attempts(addresses=2, answered=False)) == [0.0]


def test_who_says_that_it_cannot_serve_now_is_there() -> None:
    refusing = SpecwireError(grpc.StatusCode.UNAVAILABLE, "the session log does not answer")
    known = attempts(addresses=2, answered=False)
    assert known.after(BROKEN, 0.0) == 0.0
    assert known.after(refusing, 0.0) > 0.0
    assert len(waits(known)) > 2


def test_the_service_says_when_to_come_again() -> None:
    full = SpecwireError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after=4.0)
    assert waits(attempts(patience=10.0), full) == [4.0, 4.0]


def test_news_begins_anew_and_repetitions_do_not() -> None:
    known = attempts(patience=1.0)
    known.after(BROKEN, 0.0)
    known.heard(lambda: 0.9, news=True)
    assert known.after(BROKEN, 5.0) > 0.0
    known.heard(lambda: 5.5, news=False)
    with pytest.raises(SpecwireError):
        known.after(BROKEN, 6.0)


def test_a_connection_that_held_was_no_failure() -> None:
    known = attempts(patience=1.0)
    known.after(BROKEN, 0.0)
    known.heard(lambda: 0.5, news=False)
    assert known.after(BROKEN, 60.0) > 0.0
