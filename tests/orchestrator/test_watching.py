"""A session that one orchestrator has begun, asked for at another one with the same log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest
from redis import Redis

from deploy.cli.clients.generate import summary
from orchestrator import ownership as following
from orchestrator import server
from orchestrator.store import StoredSession
from orchestrator.store.scripts import session_keys
from specwire.client import AsyncClient, Chunk, Event, Finished, SpecwireError, Started
from specwire.client.events import PartialCompletion
from specwire.client.requests import RequestOptions
from specwire.client.stream import event_from_wire
from specwire.core import session as core_session
from specwire.core.messages import FinishReason
from specwire.core.session import State
from specwire.core.text import hash_of
from specwire.v1 import generation_pb2, generation_pb2_grpc
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.stack import ALL, PROMPT, SLOW_TARGET, TARGET, UNREAD_S, Stack, held, plain, stack
from tests.wait import raised, until

LENGTH = 120
LIMIT_S = 120.0
# Of a session that is in the middle of its text for as long as a test needs it to be.
MIDDLE = 40


@dataclass
class Pair:
    """Two orchestrators with one log, and a client of each that does not resume by itself."""

    stack: Stack
    other: server.RunningOrchestrator
    first: AsyncClient
    second: AsyncClient

    async def begin(self, tokens: int, **options: object) -> tuple[Started, AsyncGenerator[Event, None]]:
        """A session of the first one with at least `tokens` of its output shown."""
        asked = RequestOptions(max_tokens=LENGTH, ignore_eos=True, request_id="")
        asked.update(options)  # type: ignore[typeddict-item]  # any option, by name
        events = self.first.generate(PROMPT, **asked)
        started = await anext(events)
        assert isinstance(started, Started)
        seen = 0
        while seen < tokens:
            event = await anext(events)
            assert isinstance(event, Chunk)
            seen += len(event.tokens)
        return started, events

    async def taken_over(self, session_id: str) -> AsyncGenerator[Event, None]:
        """What the other one shows, which has taken the session over by the first event."""
        request = generation_pb2.WatchRequest(session_id=session_id, take_over=True)
        claims = self.other.orchestrator.tally.claims
        async with grpc.aio.insecure_channel(self.other.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            stream = stub.Watch(request, timeout=LIMIT_S)
            await until(lambda: self.other.orchestrator.tally.claims > claims)
            async for response in stream:
                yield event_from_wire(response)

    async def fence(self, session_id: str) -> int:
        return (await self.second.get_session(session_id)).fence


@asynccontextmanager
async def pair(server: RedisServer) -> AsyncIterator[Pair]:
    async with stack(SLOW_TARGET, redis_url=server.url) as running:
        other = await running.another(detach_grace=UNREAD_S)
        async with (
            AsyncClient(running.orchestrator.address, patience=0) as first,
            AsyncClient(other.address, patience=0) as second,
        ):
            yield Pair(running, other, first, second)


@pytest.fixture
async def both(server: RedisServer) -> AsyncIterator[Pair]:
    async with pair(server) as running:
        yield running


async def tokens_of(events: AsyncGenerator[Event, None]) -> tuple[list[int], str, Finished]:
    """Tokens and text of the rest of a stream, which ends as it should."""
    tokens: list[int] = []
    text, last = "", None
    async with asyncio.timeout(LIMIT_S):
        async for event in events:
            if isinstance(event, Chunk):
                tokens += event.tokens
            if isinstance(event, Chunk | Finished):
                text += event.text
            last = event
    assert isinstance(last, Finished)
    return tokens, text, last


async def watched(address: str, **request: object) -> list[int]:
    """The tokens of a Watch with fields of the request's own."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        stream = stub.Watch(generation_pb2.WatchRequest(**request), timeout=LIMIT_S)  # type: ignore[arg-type]  # any field, by name
        return [token async for response in stream for token in response.chunk.tokens]


async def test_a_damaged_log_is_taken_from_nobody(server: RedisServer, both: Pair) -> None:
    """Who asks for it is told, and its owner, which has everything, writes it again and goes on."""
    with held(MIDDLE):
        started, events = await both.begin(10)
        fence = await both.fence(started.session_id)
        with Redis(unix_socket_path=str(server.socket)) as raw:
            raw.setrange(session_keys(started.session_id)[2], 0, b"\xff")
        refused = await raised(
            grpc.aio.AioRpcError, watched(both.other.address, session_id=started.session_id, take_over=True)
        )
    assert refused.code() is grpc.StatusCode.DATA_LOSS
    await tokens_of(events)
    assert await both.fence(started.session_id) == fence
    seen, _, _ = await tokens_of(both.second.watch(started.session_id))
    assert seen == plain(TARGET, PROMPT, LENGTH)


async def test_what_another_one_drives_is_shown_and_not_taken(both: Pair) -> None:
    started, events = await both.begin(10)
    fence = await both.fence(started.session_id)
    seen, _, finished = await tokens_of(both.second.watch(started.session_id))
    await tokens_of(events)
    assert await both.fence(started.session_id) == fence
    assert seen == plain(TARGET, PROMPT, LENGTH)
    assert finished.reason is FinishReason.LENGTH
    assert finished.stats.output_tokens == LENGTH


async def test_who_takes_over_goes_on_with_the_options_and_has_the_reports_and_the_figures(both: Pair) -> None:
    """Both readers see all of it, and the former owner can append nothing more.

    Penalties are a function of the text, and what was reported of it is in the log. The time of its first token is
    known to whoever emitted that.
    """
    wish = RequestOptions(temperature=0.8, seed=4, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=2)
    wish.update({"max_tokens": LENGTH, "ignore_eos": True})
    undisturbed = await both.first.complete(PROMPT, **wish)
    with held(MIDDLE) as let_go:
        started, events = await both.begin(30, **wish)
        fence = await both.fence(started.session_id)
        taking = PartialCompletion()
        async for event in both.taken_over(started.session_id):
            let_go(ALL)
            taking.add(event)
    tokens, _, finished = await tokens_of(events)
    assert await both.fence(started.session_id) > fence
    taken, plainly = taking.completion(), undisturbed.stats
    assert (taken.tokens, taken.logprobs) == (undisturbed.tokens, undisturbed.logprobs)
    assert len(taken.logprobs) == LENGTH
    assert tuple(tokens) == undisturbed.tokens[-len(tokens) :]
    assert finished.reason is FinishReason.LENGTH
    assert finished.stats.output_tokens == LENGTH
    assert plainly.time_to_first_token_us > taken.stats.time_to_first_token_us == 0
    for stats in (plainly, taken.stats):
        assert stats.target_forwards == stats.output_tokens - stats.accepted  # no drafter dials in late
    assert taken.stats.accepted <= taken.stats.proposed
    assert "first after" not in summary(taken)
    assert "first after" in summary(undisturbed)


async def test_what_has_ended_is_replayed(both: Pair) -> None:
    """From any position, the text goes on where the one released before it ends."""
    expected = plain(TARGET, PROMPT, 40)
    stop = f" {expected[20]} {expected[21]}"
    text = " ".join(map(str, expected)).partition(stop)[0]
    done = await both.first.complete(PROMPT, max_tokens=40, ignore_eos=True, stop=[stop])
    assert done.text == text
    for behind in (0, 1, 7, 20, len(done.tokens)):
        position = len(PROMPT) + behind
        known = hash_of((*PROMPT, *done.tokens[:behind]))
        events = both.second.watch(done.session_id, position, prefix_hash=known)
        tokens, rest, finished = await tokens_of(events)
        assert tokens == list(done.tokens[behind:])
        assert text.endswith(rest)
        assert (finished.reason, finished.text_length) == (FinishReason.STOP_STRING, len(text))


async def test_what_is_claimed_while_the_orchestrator_leaves_is_not_driven(
    monkeypatch: pytest.MonkeyPatch, both: Pair
) -> None:
    started, _ = await both.begin(10, request_id="left-while-claimed", max_tokens=4000)
    leaving, claimed, answer = both.other.orchestrator, asyncio.Event(), asyncio.Event()
    claim = leaving.store.claim

    async def late(session_id: str, owner: str, known: int, now_us: int) -> StoredSession:
        log = await claim(session_id, owner, known, now_us)
        claimed.set()
        await answer.wait()
        return log

    monkeypatch.setattr(leaving.store, "claim", late)
    watching = both.second.watch(started.session_id, timeout=LIMIT_S)
    await anext(watching)
    driver = leaving.sessions[started.session_id]
    leaving._ownership.take_over(driver)
    async with asyncio.timeout(LIMIT_S):
        await claimed.wait()
        await leaving.drain(0.0)
        answer.set()
        await until(lambda: not driver._tasks)
    assert driver.session.state is State.FENCED
    assert (await raised(SpecwireError, tokens_of(watching))).code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("here", [False, True])
async def test_cancel_ends_what_nobody_drives(monkeypatch: pytest.MonkeyPatch, here: bool, both: Pair) -> None:
    """It needs no verifier. here: its owner in the log is the one that is asked, which has spoken a moment ago."""
    if not here:
        monkeypatch.setattr("orchestrator.store.base.LEASE_S", 0.0)
    with held(MIDDLE):
        started, _ = await both.begin(5, request_id=f"to-end-{here}")
        driver = both.stack.orchestrator.orchestrator.sessions[started.session_id]
        driver.abandon(grpc.StatusCode.UNAVAILABLE, "gone")
    for verifier in both.other.orchestrator.pool.verifiers:
        verifier.refusal = "a verifier that this one may not use"
    await (both.first if here else both.second).cancel(started.session_id)
    _, _, finished = await tokens_of(both.second.watch(started.session_id))
    assert finished.reason is FinishReason.CANCELLED


async def test_who_reads_it_elsewhere_learns_that_it_is_deleted(both: Pair) -> None:
    started, events = await both.begin(5, max_tokens=4000)
    watching = both.second.watch(started.session_id, timeout=LIMIT_S)
    await anext(watching)
    await both.second.delete_session(started.session_id)
    for stream in (watching, events):
        assert (await raised(SpecwireError, tokens_of(stream))).code is grpc.StatusCode.NOT_FOUND
    assert not both.other.orchestrator.sessions


async def test_a_readers_text_is_held_against_the_log(both: Pair) -> None:
    done = await both.first.complete(PROMPT, max_tokens=20, ignore_eos=True)
    known, end = hash_of((*PROMPT, *done.tokens)), len(PROMPT) + 20
    cases = [
        (end, known ^ 1, grpc.StatusCode.DATA_LOSS, "prefix_hash: the text before 23 is another one"),
        (end + 1, known, grpc.StatusCode.DATA_LOSS, "from_position: the log ends at 23, before 24"),
        (end + 1, None, grpc.StatusCode.INVALID_ARGUMENT, "from_position: must be from 3 to 23, not 24"),
        (1, None, grpc.StatusCode.INVALID_ARGUMENT, "from_position: must be from 3 to 23, not 1"),
    ]
    for position, prefix_hash, code, message in cases:
        refused = await raised(
            SpecwireError, anext(both.second.watch(done.session_id, position, prefix_hash=prefix_hash)), message
        )
        assert refused.code is code


async def test_a_reader_may_know_more_than_is_shown_here_yet(monkeypatch: pytest.MonkeyPatch, both: Pair) -> None:
    """It comes from an orchestrator that looked at the log later."""
    expected = plain(TARGET, PROMPT, LENGTH)
    started, events = await both.begin(1)
    monkeypatch.setattr(following, "POLL_S", 0.5)
    behind = both.second.watch(started.session_id)
    await anext(behind)
    shown = [event async for event in events if isinstance(event, Chunk)]
    known = sum(len(chunk.tokens) for chunk in shown) // 2
    position = len(PROMPT) + LENGTH - known
    prefix_hash = hash_of((*PROMPT, *expected[: LENGTH - known]))
    tokens, _, _ = await tokens_of(both.second.watch(started.session_id, position, prefix_hash=prefix_hash))
    await behind.aclose()
    assert tokens == expected[LENGTH - known :]


async def test_the_next_turn_stands_behind_its_parent(both: Pair) -> None:
    done = await both.first.complete(PROMPT, max_tokens=20, ignore_eos=True)
    more = (9, 11)
    tokens, _, _ = await tokens_of(both.second.continue_(done.session_id, more, max_tokens=20, ignore_eos=True))
    assert tokens == plain(TARGET, (*PROMPT, *done.tokens, *more), 20)
    with held(MIDDLE):
        started, events = await both.begin(1)
        for parent, code in (
            (started.session_id, grpc.StatusCode.FAILED_PRECONDITION),
            ("nobody's", grpc.StatusCode.NOT_FOUND),
        ):
            assert (await raised(SpecwireError, both.second.complete("5", parent=parent), "parent: ")).code is code
        await events.aclose()


async def test_a_session_stays_with_its_model(server: RedisServer) -> None:
    async with pair(server) as both, stack("scripted:8:vocab=64", redis_url=server.url) as foreign:
        done = await both.first.complete(PROMPT, max_tokens=5, ignore_eos=True)
        refused = await raised(
            SpecwireError, anext(foreign.client.watch(done.session_id)), "session_id: the session is pinned to weights"
        )
    assert refused.code is grpc.StatusCode.FAILED_PRECONDITION


async def test_calls_that_cross_at_two_orchestrators_are_one_session(both: Pair) -> None:
    for number in range(5):
        asked = RequestOptions(max_tokens=30, ignore_eos=True, temperature=1.0, request_id=f"crossing-{number}")
        one, two = await asyncio.gather(*(c.complete(PROMPT, **asked) for c in (both.first, both.second)))
        assert one.session_id == two.session_id
        assert (one.tokens, one.text, one.seed) == (two.tokens, two.text, two.seed)


async def test_without_a_verifier_a_session_is_left_to_others(both: Pair) -> None:
    started, events = await both.begin(5, max_tokens=2000)
    for verifier in both.other.orchestrator.pool.verifiers:
        verifier.refusal = "a verifier that this one may not use"
    fence = await both.fence(started.session_id)
    refused = await raised(
        grpc.aio.AioRpcError,
        watched(both.other.address, session_id=started.session_id, take_over=True),
        "no verifier is there",
    )
    assert refused.code() is grpc.StatusCode.UNAVAILABLE
    await anext(both.second.watch(started.session_id))
    assert await both.fence(started.session_id) == fence
    await events.aclose()


async def test_it_goes_on_where_there_is_a_verifier(server: RedisServer) -> None:
    async with (
        stack(SLOW_TARGET, redis_url=server.url, verifier_wait=0.5) as one,
        stack(SLOW_TARGET, redis_url=server.url) as other,
        AsyncClient([one.orchestrator.address, other.orchestrator.address]) as client,
    ):
        events = client.generate(PROMPT, max_tokens=LENGTH, ignore_eos=True)
        with held(MIDDLE):
            await anext(events)
            first = await anext(events)
            assert isinstance(first, Chunk)
            stopping = asyncio.create_task(one.verifier.stop(0.0))
            await until(lambda: not one.orchestrator.orchestrator.pool.verifiers[0].up)
        await stopping
        tokens, _, finished = await tokens_of(events)
        assert client.address == other.orchestrator.address
    assert [*first.tokens, *tokens] == plain(TARGET, PROMPT, LENGTH)
    assert finished.reason is FinishReason.LENGTH


async def test_a_reader_at_the_end_of_the_credit_has_taken_what_is_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was shown the text, but its connection broke before that was noted; there is nothing else it could take."""
    monkeypatch.setattr(core_session, "MOST_BUFFER", 1)  # the credit ends before the text, however far the verifier
    async with stack(SLOW_TARGET) as running, AsyncClient(running.orchestrator.address, patience=0) as client:
        with held(MIDDLE // 4):
            events = client.generate(PROMPT, max_tokens=LENGTH, ignore_eos=True, request_id="r")
            started = await anext(events)
            assert isinstance(started, Started)
            assert isinstance(await anext(events), Chunk)
            await events.aclose()
            driver = running.orchestrator.orchestrator.sessions[started.session_id]
            await until(lambda: driver.view.readers.count == 0)
        await until(lambda: driver.session.durable == driver.session.credit)
        driver.session.taken = len(PROMPT)
        position = driver.session.durable
        known = hash_of(driver.session.text.tokens)
        tokens, _, finished = await tokens_of(client.watch(started.session_id, position, prefix_hash=known))
    assert finished.reason is FinishReason.LENGTH
    assert tokens == plain(TARGET, PROMPT, LENGTH)[position - len(PROMPT) :]
