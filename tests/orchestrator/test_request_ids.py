"""One request id is one session, also when calls cross, or when the log failed between binding the id and the start."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from orchestrator.store import SessionRecord, StoreUnavailable
from orchestrator.store.memory import MemoryStore
from specwire.client import AsyncClient, Finished, SpecwireError
from specwire.core.limits import FinishReason
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.stack import PROMPT, SLOW_TARGET, plain, stack


async def test_calls_that_cross_join_one_session() -> None:
    with RedisServer() as redis:
        async with stack(SLOW_TARGET, redis_url=redis.url) as running:
            calls = (running.client.complete(PROMPT, max_tokens=30, ignore_eos=True, request_id="same") for _ in "abc")
            done = await asyncio.gather(*calls)
    assert len({each.session_id for each in done}) == 1
    assert [list(each.tokens) for each in done] == [plain(SLOW_TARGET, PROMPT, 30)] * 3


async def test_the_deadline_is_that_of_the_call_that_began() -> None:
    async with stack(SLOW_TARGET) as running, AsyncClient(running.orchestrator.address, patience=0) as hasty:
        events = running.client.generate(PROMPT, max_tokens=100, ignore_eos=True, request_id="two")
        await anext(events)
        with pytest.raises(SpecwireError) as late:
            await hasty.complete(PROMPT, max_tokens=100, ignore_eos=True, request_id="two", timeout=0.2)
        *_, finished = [event async for event in events]
    assert late.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.LENGTH


async def test_a_log_that_does_not_answer_is_unavailable() -> None:
    async with stack() as running, AsyncClient(running.client.address, patience=0.0) as client:
        running.orchestrator.orchestrator.store = DeafStore("bind_request")
        with pytest.raises(SpecwireError) as refused:
            await client.complete(PROMPT, max_tokens=3, request_id="unbound")
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    assert refused.value.message == "the session log does not answer"


async def test_a_repeated_id_starts_what_its_first_call_could_not() -> None:
    async with stack() as running, AsyncClient(running.client.address, patience=0.0) as client:
        running.orchestrator.orchestrator.store = store = DeafStore("create")
        with pytest.raises(SpecwireError) as refused:
            await client.complete(PROMPT, max_tokens=3, request_id="again")
        store.deaf_to = ""
        done = await running.client.complete(PROMPT, max_tokens=3, ignore_eos=True, request_id="again")
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    assert len(done.tokens) == 3


async def test_calls_join_a_session_that_is_just_being_created() -> None:
    async with stack(SLOW_TARGET) as running:
        running.orchestrator.orchestrator.store = store = SlowStore()
        calls = [asyncio.create_task(running.client.complete(PROMPT, max_tokens=3, request_id="slow"))]
        await store.created.wait()
        calls.append(asyncio.create_task(running.client.complete(PROMPT, max_tokens=3, request_id="slow")))
        await asyncio.sleep(0.1)
        store.answer.set()
        first, second = await asyncio.gather(*calls)
    assert first.session_id == second.session_id
    assert first.tokens == second.tokens


async def test_a_caller_that_leaves_early_leaves_a_session_with_a_driver() -> None:
    async with stack(SLOW_TARGET) as running:
        running.orchestrator.orchestrator.store = store = SlowStore()
        call = asyncio.create_task(running.client.complete(PROMPT, max_tokens=9, ignore_eos=True, request_id="left"))
        await store.created.wait()
        call.cancel()
        await asyncio.sleep(0.1)
        store.answer.set()
        done = await running.client.complete(PROMPT, max_tokens=9, ignore_eos=True, request_id="left")
    assert list(done.tokens) == plain(SLOW_TARGET, PROMPT, 9)


class SlowStore(MemoryStore):
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


class DeafStore(MemoryStore):
    """Does not answer one of the calls."""

    def __init__(self, deaf_to: str) -> None:
        super().__init__()
        self.deaf_to = deaf_to

    async def create(
        self, record: SessionRecord, ttl_s: float, owner: str = "", retention_s: float | None = None
    ) -> int:
        self._hear("create")
        return await super().create(record, ttl_s, owner, retention_s)

    async def bind_request(self, tenant: str, request_id: str, session_id: str, ttl_s: float) -> str:
        self._hear("bind_request")
        return await super().bind_request(tenant, request_id, session_id, ttl_s)

    def _hear(self, call: str) -> None:
        if call == self.deaf_to:
            raise StoreUnavailable("the session log does not answer")
