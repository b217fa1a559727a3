"""One request id is one session, also when calls cross, or when the log failed between binding the id and the start."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import grpc
import pytest

from orchestrator.session.appender import Appender, Lifetimes
from orchestrator.session.driver import SessionDriver
from orchestrator.session.output import Output
from orchestrator.sessions import KnownSessions
from orchestrator.store import Bound, SessionRecord, StoreUnavailable
from orchestrator.store.sqlite import SqliteStore
from orchestrator.tenants import Access, new_session_id
from specwire.client import AsyncClient, Finished, SpecwireError
from specwire.client.requests import RequestOptions
from specwire.core.messages import Append, End, FinishReason
from specwire.rpc.channel import open_channel
from specwire.rpc.errors import StatusError
from specwire.v1 import generation_pb2, generation_pb2_grpc
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.stack import PROMPT, SLOW_TARGET, held, plain, stack
from tests.orchestrator.test_store import UnsteadyStore, alter, lose_logs, record_of
from tests.wait import raised, until
from verify_service.engine.messages import QueuePatience

LIMIT_S = 120.0


async def test_what_a_damaged_log_has_an_id_stand_for_is_no_session() -> None:
    """Neither is one begun under such a name, nor is another tenant's joined."""
    async with stack(SLOW_TARGET) as running, AsyncClient(running.client.address, patience=0.0) as client:
        known = running.orchestrator.orchestrator
        for request_id, forged in (("a", "x"), ("b", new_session_id("somebody else"))):
            await known.store.bind_request("", request_id, forged, 60.0, "-")
            refused = await raised(SpecwireError, client.complete(PROMPT, max_tokens=3, request_id=request_id))
            assert refused.code is grpc.StatusCode.DATA_LOSS
            assert request_id in str(refused)
        assert not known.sessions


async def test_the_deadline_is_that_of_the_call_that_began() -> None:
    async with stack(SLOW_TARGET) as running, AsyncClient(running.orchestrator.address, patience=0) as hasty:
        events = running.client.generate(PROMPT, max_tokens=100, ignore_eos=True, request_id="two")
        with held(40):
            await anext(events)
            late = await raised(
                SpecwireError, hasty.complete(PROMPT, max_tokens=100, ignore_eos=True, request_id="two", timeout=0.2)
            )
        *_, finished = [event async for event in events]
    assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.LENGTH


@pytest.mark.parametrize("call", ["bind_request", "create"])
async def test_a_log_that_does_not_answer_is_unavailable(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated id starts what its first call could not."""

    async def deaf(*_: object) -> None:
        raise StoreUnavailable("the session log does not answer")

    wish = RequestOptions(max_tokens=3, ignore_eos=True, request_id="again")
    async with stack() as running, AsyncClient(running.client.address, patience=0.0) as client:
        with monkeypatch.context() as patch:
            patch.setattr(running.orchestrator.orchestrator.store, call, deaf)
            refused = await raised(SpecwireError, client.complete(PROMPT, **wish))
        done = await client.complete(PROMPT, **wish)
    assert (refused.code, refused.message) == (
        grpc.StatusCode.UNAVAILABLE,
        "the session log does not answer",
    )
    assert len(done.tokens) == 3


@pytest.mark.parametrize("leaves", [False, True])
async def test_calls_join_a_session_that_is_just_being_created(leaves: bool) -> None:
    """Also where the first caller leaves early: its session has a driver all the same."""
    wish = RequestOptions(max_tokens=9, ignore_eos=True, request_id="slow")
    async with stack(SLOW_TARGET) as running:
        running.orchestrator.orchestrator.store = store = SlowStore()
        first = asyncio.create_task(running.client.complete(PROMPT, **wish))
        await store.created.wait()
        if leaves:
            first.cancel()
        second = asyncio.create_task(running.client.complete(PROMPT, **wish))
        await asyncio.sleep(0.1)
        store.answer.set()
        done = await second
        assert list(done.tokens) == plain(SLOW_TARGET, PROMPT, 9)
        assert leaves or (await first).session_id == done.session_id


@pytest.mark.parametrize(
    "other",
    [{"max_tokens": 4}, {"stop": ["x"]}, {"seed": 7}, {"temperature": 0.5}, {"drafting": False}, {"logprobs": 1}],
)
async def test_an_id_is_not_taken_for_another_request(other: dict[str, Any]) -> None:
    """Neither while the first one runs, nor after its end, nor elsewhere."""
    asked: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True, "request_id": "mine"}
    async with stack() as running, AsyncClient(running.client.address, patience=0.0) as client:
        done = await client.complete(PROMPT, **asked)
        for prompt, options in ((PROMPT, {**asked, **other}), ((*PROMPT, 1), asked)):
            refused = await raised(SpecwireError, client.complete(prompt, **options))
            assert refused.code is grpc.StatusCode.ALREADY_EXISTS
            assert refused.message.startswith("request_id: 'mine' stands for another request")
        again = await client.complete(PROMPT, **asked)
    assert again.session_id == done.session_id


async def test_what_is_refused_leaves_nothing_behind(redis: RedisServer) -> None:
    """Neither a key nor a place; and the same id can be used once there is room."""
    access = Access(sessions=1, tokens_per_minute=1000)
    async with stack(SLOW_TARGET, redis_url=redis.url, access=access) as running:
        store, tenant = running.orchestrator.orchestrator.store, ""
        async with AsyncClient(running.client.address, patience=0.0) as client:
            events = client.generate(PROMPT, max_tokens=40, ignore_eos=True, request_id="first")
            with held(20):
                await anext(events)
                for tokens in (30, 999):
                    refused = await raised(
                        SpecwireError, client.complete(PROMPT, max_tokens=tokens, request_id="second")
                    )
                    assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
                    assert await store.bound_request(tenant, "second") is None
            joined = await client.complete(PROMPT, max_tokens=40, ignore_eos=True, request_id="first")
            assert [event async for event in events]
            done = await client.complete(PROMPT, max_tokens=30, ignore_eos=True, request_id="second")
    assert list(joined.tokens) == plain(SLOW_TARGET, PROMPT, 40)
    assert list(done.tokens) == plain(SLOW_TARGET, PROMPT, 30)


async def test_an_id_whose_session_found_no_room_can_be_used_again() -> None:
    async with stack(SLOW_TARGET, slots=1, patience=QueuePatience(0)) as running:
        address = running.client.address
        async with AsyncClient(address, patience=0.0) as client:
            events = client.generate(PROMPT, max_tokens=2000, ignore_eos=True)
            await anext(events)
            await anext(events)
            for _ in range(2):
                full = await raised(
                    SpecwireError, client.complete(PROMPT, max_tokens=3, ignore_eos=True, request_id="again")
                )
                assert full.code is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert full.retry_after is not None
            await events.aclose()
            sessions = running.orchestrator.orchestrator.sessions
            await until(lambda: all(each.view.output.end is not None for each in sessions.values()))
            done = await client.complete(PROMPT, max_tokens=3, ignore_eos=True, request_id="again")
    assert list(done.tokens) == plain(SLOW_TARGET, PROMPT, 3)


@pytest.mark.parametrize("how", ["lost", "deleted"])
async def test_an_id_whose_session_is_gone_begins_another(how: str) -> None:
    """Not the old one once more: whoever still knows that one must not take the new text for its own."""
    async with stack() as running, AsyncClient(running.client.address, patience=0.0) as client:
        store = UnsteadyStore()
        running.orchestrator.orchestrator.store = store
        first = await client.complete(PROMPT, max_tokens=3, ignore_eos=True, request_id="old")
        (bound,) = alter(store, "SELECT * FROM requests")
        running.orchestrator.orchestrator.sessions.clear()  # after a minute
        if how == "lost":
            lose_logs(store)
        else:
            await store.delete(first.session_id)
            # The answer to its second half was lost.
            alter(store, "INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?)", *bound)
        store.late_s = 61.0
        second = await client.complete(PROMPT, max_tokens=3, ignore_eos=True, request_id="old")
        third = await client.complete(PROMPT, max_tokens=3, ignore_eos=True, request_id="old")
    assert second.session_id != first.session_id
    assert third.session_id == second.session_id


async def test_an_id_stands_for_its_session_for_as_long_as_that_runs() -> None:
    """However long: with its signs of life its owner renews what was bound at its beginning."""
    store = UnsteadyStore()
    now = 0.0
    record = record_of("long", tenant="t", request_id="r", request_digest="d")
    fence = await store.create(record, 60.0)
    appender = Appender(store, record, fence, Output(3), "me", Lifetimes(60.0, 30.0), 5.0)
    appender._now = lambda: now  # the loop's clock: the store's is the test's own, too
    await store.bind_request("t", "r", "long", 90.0, "d")
    for now in range(0, 600, 5):
        store.late_s = now
        await appender.renew()
    assert await store.bound_request("t", "r") == Bound("long", "d")
    await appender.write(Append(3, (), (), End(FinishReason.ERROR, "no verifier", 0)), repeatable=True)
    assert await store.bound_request("t", "r") is None


@pytest.fixture
def long_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner's silence is no reason to claim a session for as long as a test may run."""
    for module in ("store.base", "session.output"):
        monkeypatch.setattr(f"orchestrator.{module}.LEASE_S", 10 * LIMIT_S)


@pytest.mark.usefixtures("long_lease")
async def test_a_client_goes_on_at_once_with_what_its_orchestrator_had_only_just_created(redis: RedisServer) -> None:
    """That one is gone before it could say Started; another one does not wait until it has been silent for long."""
    async with stack(SLOW_TARGET, redis_url=redis.url) as running:
        other = await running.another()
        dying = running.orchestrator.orchestrator
        create, created = dying.store.create, asyncio.Event()

        async def create_and_die(*args: Any) -> int:
            fence = await create(*args)
            created.set()
            await asyncio.sleep(10 * LIMIT_S)
            return fence

        # Its process ends in the middle of it.
        dying.store.create = create_and_die  # type: ignore[method-assign,assignment]
        async with AsyncClient([running.orchestrator.address, other.address]) as client:
            call = asyncio.create_task(client.complete(PROMPT, max_tokens=20, ignore_eos=True))
            async with asyncio.timeout(LIMIT_S):
                await created.wait()
                await running.orchestrator._server.stop(0.0)
                done = await call
        assert other.orchestrator.tally.claims == 1
    assert list(done.tokens) == plain(SLOW_TARGET, PROMPT, 20)


async def test_two_that_lost_their_connections_do_not_take_it_from_each_other_for_ever(redis: RedisServer) -> None:
    """Each claims at most once, and then reads on what the other one writes."""
    request = generation_pb2.GenerateRequest(request_id="two", take_over=True)
    request.tokens.ids.extend(PROMPT)
    request.stopping.max_tokens = 150
    request.stopping.ignore_eos = True

    async def told(address: str) -> list[int]:
        async with open_channel(address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            return [token async for each in stub.Generate(request) for token in each.chunk.tokens]

    async with stack(SLOW_TARGET, redis_url=redis.url) as running:
        other = await running.another()
        both = running.orchestrator, other
        async with asyncio.timeout(LIMIT_S):
            texts = await asyncio.gather(*(told(each.address) for each in (*both, *both)))
        claims = sum(each.orchestrator.tally.claims for each in both)
    assert texts == [plain(SLOW_TARGET, PROMPT, 150)] * 4
    assert claims <= 4


class SlowStore(SqliteStore):
    """Has created a session's log, but does not say so before `answer` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.created = asyncio.Event()
        self.answer = asyncio.Event()

    async def create(
        self, record: SessionRecord, ttl_s: float, owner: str = "", retention_s: float | None = None
    ) -> int:
        fence = await super().create(record, ttl_s, owner, retention_s)
        self.created.set()
        await self.answer.wait()
        return fence


# ----------------------------------------------------------------------------------------------------------------------
# Sessions that are about to begin.


async def test_a_failure_to_begin_that_nobody_waits_for_is_no_unhandled_error() -> None:
    known, answer = KnownSessions(patience=10.0), asyncio.Event()
    unhandled: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))

    async def fail() -> SessionDriver:
        await answer.wait()
        raise StatusError(grpc.StatusCode.UNAVAILABLE, "the log does not answer")

    caller = asyncio.create_task(known.open("session", fail()))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait({caller})
    assert known.knows("session")
    answer.set()
    await asyncio.wait(known._opening.values())
    assert not known.knows("session")
    del caller
    gc.collect()
    assert unhandled == []
