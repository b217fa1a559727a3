"""The asyncio client against a scripted service."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from specwire.client import (
    AsyncClient,
    Chunk,
    Finished,
    PartScore,
    PromptEcho,
    SessionState,
    SpecwireError,
    Started,
    TextScore,
    TokenLogprobs,
)
from specwire.core.messages import FinishReason, Outcome
from specwire.core.text import hash_of
from specwire.rpc.errors import StatusError
from specwire.v1 import common_pb2, generation_pb2
from tests.client.service import FINISHED, FIRST, SECOND, STARTED, Scripted, serving
from tests.wait import raised


async def test_events_come_in_order_with_all_that_they_say() -> None:
    async with serving(Scripted()) as address, AsyncClient(address) as client:
        started, first, second, finished = [event async for event in client.generate("hello")]
    assert isinstance(started, Started)
    assert (started.session_id, started.prompt_tokens) == ("s-1", 2)
    assert (started.sampling.seed, started.sampling.rule, started.sampling.top_p) == (7, "coupled", 0.9)
    assert isinstance(first, Chunk)
    assert isinstance(second, Chunk)
    assert (first.position, first.tokens, first.text, first.text_ends) == (2, (5, 6), "ab", (1, 2))
    assert first.outcomes == (Outcome.ACCEPTED, Outcome.BONUS)
    assert first.timings is not None
    assert first.timings.emitted_ns == 4
    assert second.timings is None
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.text, finished.text_length) == (FinishReason.LENGTH, "c", 3)
    assert finished.stats.target_forwards == 2
    assert started.received_ns <= first.received_ns <= second.received_ns <= finished.received_ns


async def test_a_server_without_room_says_when_to_ask_again() -> None:
    failure = StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, "all slots are taken", 2.5)
    async with serving(Scripted((STARTED,), failure)) as address, AsyncClient(address, patience=0) as client:
        streamed = await raised(SpecwireError, client.complete("x"))
        asked = await raised(SpecwireError, client.get_session("s-1"))
    assert streamed.retry_after == asked.retry_after == 2.5


async def test_sessions_can_be_watched_read_and_cancelled() -> None:
    servicer = Scripted()
    async with serving(servicer) as address, AsyncClient(address) as client:
        assert len([event async for event in client.watch("s-1", 2, prefix_hash=5)]) == 4
        assert servicer.asked == [generation_pb2.WatchRequest(session_id="s-1", from_position=2, prefix_hash=5)]
        assert await client.get_session("s-1") == SessionState(2, (1, 2, 5), None, 9)
        await client.cancel("s-1")
        assert (await client.server_info()).durability == "memory"


async def test_texts_can_be_scored() -> None:
    servicer = Scripted()
    async with serving(servicer) as address, AsyncClient(address) as client:
        [score] = await client.score_text("x", [("a", [7])], model="m")
        assert score == TextScore((PartScore((4, 5), (-0.5, -1.0)),) * 2)
        assert score.logprob == 2 * score.parts[0].logprob == -3.0
        await raised(SpecwireError, client.score_text("x", [("a",), ("b",)]), "another number of scores")
    asked = servicer.asked[0]
    assert isinstance(asked, generation_pb2.ScoreTextRequest)
    assert (asked.prefix.text, asked.model) == ("x", "m")
    assert [part.text or list(part.tokens.ids) for part in asked.continuations[0].parts] == ["a", [7]]


async def test_a_failure_within_the_stream_comes_after_its_events() -> None:
    servicer = Scripted(events=(STARTED, FIRST), failure=StatusError(grpc.StatusCode.DATA_LOSS, "the log is short"))
    async with serving(servicer) as address, AsyncClient(address) as client:
        events = client.generate("x")
        assert [type(await anext(events)) for _ in range(2)] == [Started, Chunk]
        await raised(SpecwireError, anext(events), "DATA_LOSS: the log is short")


async def test_a_stream_that_ends_too_early_is_an_error() -> None:
    async with serving(Scripted(events=(STARTED, FIRST))) as address, AsyncClient(address) as client:
        await raised(SpecwireError, client.complete("x"), "DATA_LOSS: the stream ended before the session was finished")


def chunk_of_no_known_outcome() -> generation_pb2.Chunk:
    return generation_pb2.Chunk.FromString(b"\x1a\x01\x63")  # outcomes: 99


async def test_what_the_protocol_does_not_allow_is_an_error() -> None:
    for event in (chunk_of_no_known_outcome(), generation_pb2.Finished()):
        async with serving(Scripted(events=(STARTED, event))) as address, AsyncClient(address) as client:
            await raised(SpecwireError, client.complete("x"), "INTERNAL: the service answered with")


async def test_what_is_reported_and_echoed_is_gathered() -> None:
    started, chunk = generation_pb2.Started(), generation_pb2.Chunk()
    started.CopyFrom(STARTED)
    started.prompt.CopyFrom(generation_pb2.Prompt(tokens=[1, 2], text="p"))
    chunk.CopyFrom(FIRST)
    chunk.logprobs.extend([common_pb2.TokenLogprobs(logprob=-0.5, top_ids=[5], top_logprobs=[-0.5])] * 2)
    async with serving(Scripted(events=(started, chunk, FINISHED))) as address, AsyncClient(address) as client:
        done = await client.complete("x", logprobs=1, echo=True)
    assert done.logprobs == (TokenLogprobs(-0.5, ((5, -0.5),)),) * 2
    assert done.prompt == PromptEcho((1, 2), "p")


def leaving() -> Scripted:
    """A service that goes away in the middle of a text."""
    return Scripted((STARTED, FIRST), StatusError(grpc.StatusCode.UNAVAILABLE, "the orchestrator is stopping"))


async def test_a_text_goes_on_at_another_address() -> None:
    second = Scripted((STARTED, SECOND, FINISHED))
    async with serving(leaving()) as one, serving(second) as two, AsyncClient([one, two]) as client:
        events = [event async for event in client.generate([1, 2])]
        assert client.address == two
    assert [type(event) for event in events] == [Started, Chunk, Chunk, Finished]
    assert second.asked[0] == generation_pb2.WatchRequest(
        session_id="s-1", from_position=4, prefix_hash=hash_of((1, 2, 5, 6)), take_over=True
    )


async def test_what_has_not_begun_is_asked_for_again_under_its_id() -> None:
    refusing = Scripted((), StatusError(grpc.StatusCode.UNAVAILABLE, "no verifier has answered yet"))
    second = Scripted()
    async with serving(refusing) as one, serving(second) as two, AsyncClient(f"{one},{two}") as client:
        completion = await client.complete("x")
    assert completion.text == "abc"
    first, request = refusing.asked[0], second.asked[0]
    assert isinstance(request, generation_pb2.GenerateRequest)
    assert isinstance(first, generation_pb2.GenerateRequest)
    assert request.request_id
    assert (first.take_over, request.take_over) == (False, True)  # the session may have begun where nobody is left
    request.take_over = False
    assert first == request


@pytest.mark.parametrize("request_id", ["", "mine"])
async def test_leaving_early_cancels_a_session_unless_its_id_is_the_callers(request_id: str) -> None:
    servicer = Scripted(events=(STARTED,), hangs=True)
    async with serving(servicer) as address, AsyncClient(address) as client:
        events = client.generate("x", request_id=request_id)
        await anext(events)
        await events.aclose()
        await asyncio.wait_for(servicer.left.wait(), 60.0)
    cancelled = generation_pb2.CancelRequest(session_id="s-1") in servicer.asked
    assert cancelled is (not request_id)


async def test_the_next_turn_names_its_parent() -> None:
    servicer = Scripted()
    async with serving(servicer) as address, AsyncClient(address) as client:
        assert len([event async for event in client.continue_("s-1", "and then?", max_tokens=5)]) == 4
    request = servicer.asked[0]
    assert isinstance(request, generation_pb2.GenerateRequest)
    assert (request.parent, request.text, request.stopping.max_tokens) == ("s-1", "and then?", 5)


@pytest.mark.parametrize("address", ["", "a:1,", [], ["a:1", " "]])
async def test_addresses_must_be_there(address: str | list[str]) -> None:
    with pytest.raises(SpecwireError, match="INVALID_ARGUMENT: address: must be HOST:PORT"):
        AsyncClient(address)
