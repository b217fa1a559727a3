"""How long sessions are kept, what of them is told, and that deleted ones are gone."""

from __future__ import annotations

import argparse
import asyncio

import grpc
import pytest

from orchestrator.options import LONGEST_S, OrchestratorOptions
from orchestrator.server import add_arguments, options_of
from orchestrator.session import appender as leases
from orchestrator.store import DeletedSession
from orchestrator.store.sqlite import SqliteStore
from specwire.client import SpecwireError
from specwire.core.invalid import InvalidParameter
from specwire.options import VERIFIER_WAIT_S
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.stack import PROMPT, SLOW_TARGET, Reading, stack
from tests.orchestrator.test_store import logs_of


def parsed(*arguments: str) -> OrchestratorOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return options_of(parser.parse_args(["--verifier", "127.0.0.1:1", *arguments]))


def test_the_command_line_says_how_the_log_is_kept() -> None:
    options = parsed("--redis-url", "redis://host", "--durability", "redis-wait:2", "--retention", "0.5")
    assert (options.redis_url, options.durability, options.retention) == ("redis://host", "redis-wait:2", 0.5)
    assert parsed().durability == ""


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="durability: redis-fsync needs a Redis as redis-url"):
        parsed("--durability", "redis-fsync")
    with pytest.raises(ValueError, match="retention: must be positive, not 0.0"):
        parsed("--retention", "0")
    with pytest.raises(ValueError, match="retention: must be at most"):
        parsed("--retention", str(2 * LONGEST_S))
    with pytest.raises(ValueError, match="retention: must be at most"):
        parsed("--retention", "inf")


def test_the_command_line_says_how_long_a_text_waits_for_a_verifier() -> None:
    assert parsed().verifier_wait == VERIFIER_WAIT_S
    assert parsed("--verifier-wait", "600").verifier_wait == 600.0
    for wrong in ("0", "-1", "nan"):
        with pytest.raises(ValueError, match="verifier_wait: must be positive"):
            parsed("--verifier-wait", wrong)
    with pytest.raises(ValueError, match="verifier_wait: must be at most"):
        parsed("--verifier-wait", "inf")


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
        for _ in range(6000):
            if done.session_id not in sessions:
                break
            await asyncio.sleep(0.01)
        assert done.session_id not in sessions
        store = running.orchestrator.orchestrator.store
        assert isinstance(store, SqliteStore)
        for _ in range(6000):
            if not logs_of(store):
                break
            await asyncio.sleep(0.01)
        assert not logs_of(store)
        with pytest.raises(SpecwireError) as gone:
            await running.client.get_session(done.session_id)
        assert gone.value.code is grpc.StatusCode.NOT_FOUND
