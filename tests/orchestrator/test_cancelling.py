"""A cancellation that was acknowledged is not lost with the log, and what the log does not have is not acknowledged."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from orchestrator import ownership as cancelling
from orchestrator.ownership import KEPT_S, Cancellations
from orchestrator.session import appender as leases
from orchestrator.session.output import SessionView
from orchestrator.store import DeletedSession, MissingSession, SessionRecord, StoreUnavailable
from orchestrator.store.sqlite import SqliteStore
from specwire.client import AsyncClient, SpecwireError
from specwire.core.law.sampling import Sampling
from specwire.core.messages import Append, EmitEnd, End, FinishReason
from specwire.core.text import Stopping
from specwire.telemetry.tracing import NO_SPAN
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.stack import PROMPT, SLOW_TARGET, Reading, stack
from tests.orchestrator.test_store import UnsteadyStore, log_of, logs_of
from tests.orchestrator.test_sweeping import orphan
from tests.wait import raised, until

RECORD = SessionRecord("session", (1, 2), Sampling(), Stopping(8))


class Scene(Cancellations):
    """A session's log, and the orchestrator that is asked to end it."""

    def __init__(self, store: UnsteadyStore, fence: int, patience: float) -> None:
        super().__init__(store, patience)
        self.log = store
        self.fence = fence

    async def put_back(self) -> None:
        """The log was lost; its owner has written it again, and has not heard of anything."""
        vars(self.log).update(vars(SqliteStore()))
        await self.log.recreate(RECORD, Append(2, (), ()), self.fence, 60.0)

    async def is_cancelled(self) -> bool:
        log = await log_of(self.log, "session")
        return log.cancelled


async def scene(*silent: str, patience: float = 5.0) -> Scene:
    store = UnsteadyStore()
    fence = await store.create(RECORD, 60.0)
    store.silent = {*silent}
    return Scene(store, fence, patience)


async def test_it_is_not_said_for_ever() -> None:
    played = await scene()
    await played.ask("session")
    played._promised["session"].until -= KEPT_S
    await played.put_back()
    await played.repeat()
    assert not await played.is_cancelled()
    assert not played._promised


async def test_what_was_refused_is_not_promised() -> None:
    cancellations = Cancellations(SqliteStore(), 5.0)
    await raised(MissingSession, cancellations.ask("session"))
    assert not cancellations._promised


@pytest.mark.parametrize("what", ["ask", "delete"])
async def test_what_the_log_does_not_have_is_not_promised(what: str) -> None:
    played = await scene("cancel", "delete", patience=0.0)
    await raised(StoreUnavailable, getattr(played, what)("session"))
    played.log.silent.clear()
    await played.repeat()
    assert not await played.is_cancelled()


async def test_a_log_that_is_silent_for_a_moment_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancelling, "INSIST_EVERY_S", 0.001)
    played = await scene("cancel", patience=30.0)
    asking = asyncio.create_task(played.ask("session"))
    await asyncio.sleep(0)
    played.log.silent.clear()
    await asking
    assert await played.is_cancelled()


def driven(abandoned: bool = False) -> SessionView:
    """A session that is driven here, and ending."""
    view = SessionView(RECORD, NO_SPAN, 0.0, lambda: None, lambda _: None)
    view.abandoned = abandoned
    return view


async def test_what_has_ended_in_the_log_need_not_be_said_again() -> None:
    played, ending = await scene(), driven()
    await played.ask("session", ending)
    await played.repeat()
    assert played._promised
    ending.output.finish(EmitEnd(End(FinishReason.CANCELLED, "", 0), ""))
    await played.repeat()
    assert not played._promised


@pytest.mark.parametrize("abandoned", [False, True])
async def test_an_end_in_the_log_counts_as_its_flag(abandoned: bool) -> None:
    """Not where it ended for readers here alone, for want of the log."""
    ending = driven(abandoned)
    ending.output.finish(EmitEnd(End(FinishReason.CANCELLED, "", 0), ""))
    played = await scene("cancel", patience=0.0)
    asking = played.ask("session", ending)
    if not abandoned:
        await asking
        return
    await raised(StoreUnavailable, asking)


@pytest.mark.parametrize("what", ["ask", "delete"])
async def test_a_session_that_is_driven_here_exists_also_where_the_log_has_lost_it(what: str) -> None:
    """Its owner has not written it again in time: that is no session of which nobody knows."""
    cancellations = Cancellations(SqliteStore(), 0.0)
    await raised(StoreUnavailable, getattr(cancellations, what)("session", driven()), "has lost the session")
    assert not cancellations._promised


async def test_what_the_log_has_acknowledged_is_no_failure_where_it_cannot_be_ended_here() -> None:
    """It is ours in the log, and of a model that is not served any more: whoever reads its log ends it."""
    async with stack() as running:
        orchestrator = running.orchestrator.orchestrator
        session_id = await orphan(running, orchestrator.store, weights_fingerprint="gone")
        await orchestrator.store.claim(session_id, orchestrator.owner)
        await running.client.cancel(session_id)
        log = await orchestrator.store.read(session_id)
    assert log is not None
    assert log.cancelled


@pytest.mark.parametrize("what", ["cancel", "delete_session"])
async def test_no_end_is_acknowledged_while_the_log_is_down(redis: RedisServer, what: str) -> None:
    """The log comes back as it was before; the session goes on until somebody's cancellation is in it."""
    async with stack(SLOW_TARGET, redis_url=redis.url, store_timeout=1.0) as running:
        reading = Reading(running.client, max_tokens=4000, ignore_eos=True)
        await reading.until(1)
        session_id = reading.session_id
        redis.save()
        redis.stop()
        async with AsyncClient(running.orchestrator.address, patience=0.0) as hasty:
            failed = await raised(SpecwireError, getattr(hasty, what)(session_id))
        assert failed.code is grpc.StatusCode.UNAVAILABLE
        assert failed.retry_after is not None
        assert "session log" in str(failed)
        await reading.leave()
        redis.start()
        await getattr(running.client, what)(session_id)
        store = running.orchestrator.orchestrator.store
        if what == "delete_session":
            await raised(DeletedSession, store.read(session_id))
            return
        log = await log_of(store, session_id)
        assert log.cancelled or log.reason is FinishReason.CANCELLED


# ----------------------------------------------------------------------------------------------------------------------
# How long sessions are kept, what of them is told, and that deleted ones are gone.


async def test_a_session_says_when_and_where_it_is(redis: RedisServer) -> None:
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


async def test_a_deleted_session_is_gone_for_everybody(redis: RedisServer) -> None:
    async with stack(redis_url=redis.url) as running:
        done = await running.client.complete(PROMPT, max_tokens=5, request_id="mine")
        await running.client.delete_session(done.session_id)
        await running.client.delete_session(done.session_id)  # the answer was lost: again
        for call in (running.client.get_session(done.session_id), running.client.cancel(done.session_id)):
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


async def test_what_was_deleted_elsewhere_is_not_remembered_here(redis: RedisServer) -> None:
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
        gone = await raised(SpecwireError, running.client.get_session(done.session_id))
        assert gone.code is grpc.StatusCode.NOT_FOUND
