"""How long sessions are kept, what of them is told, and that deleted ones are gone."""

from __future__ import annotations

import grpc
import pytest

from orchestrator.session import appender as leases
from orchestrator.store import DeletedSession
from orchestrator.store.sqlite import SqliteStore
from specwire.client import SpecwireError
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.stack import PROMPT, SLOW_TARGET, Reading, stack
from tests.orchestrator.test_store import logs_of
from tests.wait import until


async def test_a_session_says_when_and_where_it_is() -> None:
    with RedisServer() as redis:
        async with stack(redis_url=redis.url) as running:
            done = await running.client.complete(PROMPT, max_tokens=5)
            state = await running.client.get_session(done.session_id)
            log = await running.orchestrator.orchestrator.store.read(done.session_id)
    assert state.durability == "redis"
    assert state.ended is not None
    assert log is not None
    info = running.orchestrator.orchestrator.pool.require_target().info
    assert log.owner == running.orchestrator.orchestrator.owner
    pinned = (log.record.weights_fingerprint, log.record.tokenizer_fingerprint, log.record.dtype)
    assert pinned == (info.weights_fingerprint, info.tokenizer_hash, "float32")


async def test_a_deleted_session_is_gone_for_everybody() -> None:
    with RedisServer() as redis:
        async with stack(redis_url=redis.url) as running:
            done = await running.client.complete(PROMPT, max_tokens=5, request_id="mine")
            await running.client.delete_session(done.session_id)
            await running.client.delete_session(done.session_id)  # the answer was lost: again
            for call in (
                running.client.get_session(done.session_id),
                running.client.cancel(done.session_id),
            ):
                with pytest.raises(SpecwireError) as gone:
                    await call
                assert gone.value.code is grpc.StatusCode.NOT_FOUND
            with pytest.raises(SpecwireError) as gone:
                async for _ in running.client.watch(done.session_id):
                    pass
            assert gone.value.code is grpc.StatusCode.NOT_FOUND
            again = await running.client.complete(PROMPT, max_tokens=5, request_id="mine")
    assert again.session_id != done.session_id
    assert again.tokens == done.tokens


async def test_a_session_that_runs_is_ended_and_deleted() -> None:
    async with stack(SLOW_TARGET) as running:
        reading = Reading(running.client, max_tokens=2000, ignore_eos=True)
        await reading.until(1)
        await running.client.delete_session(reading.session_id)
        await reading.rest()
        with pytest.raises(DeletedSession):
            await running.orchestrator.orchestrator.store.read(reading.session_id)


async def test_what_was_deleted_elsewhere_is_not_remembered_here() -> None:
    with RedisServer() as redis:
        async with stack(redis_url=redis.url) as running, stack(redis_url=redis.url) as other:
            done = await running.client.complete(PROMPT, max_tokens=5)
            assert [event async for event in running.client.watch(done.session_id)]
            await other.client.delete_session(done.session_id)
            with pytest.raises(SpecwireError) as gone:
                async for _ in running.client.watch(done.session_id):
                    pass
            assert gone.value.code is grpc.StatusCode.NOT_FOUND
            assert done.session_id not in running.orchestrator.orchestrator.sessions


async def test_an_ended_session_is_not_remembered_for_longer_than_its_retention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.1)
    async with stack(retention=0.2) as running:
        done = await running.client.complete(PROMPT, max_tokens=5)
        sessions = running.orchestrator.orchestrator.sessions
        assert done.session_id in sessions
        await until(lambda: done.session_id not in sessions)
        store = running.orchestrator.orchestrator.store
        assert isinstance(store, SqliteStore)
        await until(lambda: not logs_of(store))
        with pytest.raises(SpecwireError) as gone:
            await running.client.get_session(done.session_id)
        assert gone.value.code is grpc.StatusCode.NOT_FOUND
