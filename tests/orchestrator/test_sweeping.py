"""Sessions whose owner is gone and that nobody asks for: whoever finds one ends it in the log."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

import grpc
import pytest

from orchestrator import sweeper as sweeping
from orchestrator.store import LEASE_S, SessionStore, StoredSession
from orchestrator.sweeper import Sweeper
from orchestrator.tenants import new_session_id
from specwire.core.law.sampling import Sampling
from specwire.core.messages import Append, End, FinishReason, Outcome
from specwire.core.text import Stopping
from specwire.rpc.errors import StatusError
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.stack import PROMPT, TARGET, Stack, plain, stack
from tests.orchestrator.test_store import UnsteadyStore, log_of, record_of
from tests.wait import LIMIT_S, asked, until

OWNER_S, READER_S = 30.0, 50.0
# A lease for which a test waits.
SHORT_S = 0.5
D = Outcome.DIRECT


@dataclass
class Scene:
    """An orchestrator that drives `driven`, and what it was told to end."""

    log: UnsteadyStore = field(default_factory=UnsteadyStore)
    driven: set[str] = field(default_factory=set)
    ended: list[tuple[str, FinishReason]] = field(default_factory=list)
    refusal: StatusError | None = None
    known_here: bool = False

    def __post_init__(self) -> None:
        self.sweeper = Sweeper(self.log, lambda: {"w": self.driven}, self._end, OWNER_S, READER_S, 3600.0)

    async def _end(self, log: StoredSession, reason: FinishReason) -> bool:
        if self.refusal is not None:
            raise self.refusal
        self.ended.append((log.record.session_id, reason))
        return not self.known_here

    async def begun(self, session_id: str, **changes: object) -> int:
        return await self.log.create(record_of(session_id, **changes), 3600.0, "them")

    async def after(self, seconds: float) -> list[tuple[str, FinishReason]]:
        """What is told to end in a round so much later."""
        self.log.late_s += seconds
        self.ended = []
        await self.sweeper.round()
        return self.ended

    async def entered(self) -> list[str]:
        self.log.late_s += 1000.0
        return await self.log.missed("w", 0.0, 99)


@pytest.fixture(autouse=True)
def _confirmed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "CONFIRM_S", 0.0)


# Instants that stay on their side of now, however long after collection a test runs.
PAST, FAR = 1.0, 1e11


def running(**changes: object) -> StoredSession:
    record = record_of("s", **changes)
    length = record.prompt_length + 1
    return StoredSession(
        record=record, fence=1, owner="them", length=length, tokens=(7,), outcomes=(D,), silent_s=LEASE_S + 1
    )


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (running(), None),
        (replace(running(), silent_s=LEASE_S - 1, cancelled=True), None),
        (running(deadline=FAR), None),
        (running(deadline=PAST), FinishReason.DEADLINE),
        (replace(running(deadline=PAST), silent_s=LEASE_S - 1), None),
        (replace(running(), cancelled=True), FinishReason.CANCELLED),
        (replace(running(), silent_s=LEASE_S + READER_S - 1), None),
        (replace(running(), silent_s=LEASE_S + READER_S + 1), FinishReason.CANCELLED),
        (replace(running(request_id=""), silent_s=LEASE_S + OWNER_S - 1), None),
        (replace(running(request_id=""), silent_s=LEASE_S + OWNER_S + 1), FinishReason.CANCELLED),
        (replace(running(), silent_s=1e9, reason=FinishReason.EOS), None),
    ],
)
async def test_who_is_to_end_and_how(log: StoredSession, reason: FinishReason | None) -> None:
    assert Scene().sweeper.due(log) is reason


async def test_who_ended_is_struck_off() -> None:
    """By its owner, or by whoever finds that it has ended, or is gone."""
    now = Scene()
    for name in ("ours", "theirs"):
        await now.log.append(name, await now.begun(name), Append(3, (), (), End(FinishReason.EOS, "", 0)))
    now.sweeper.note_end("w", "ours")
    await now.begun("deleted")
    await now.log.delete("deleted")
    await now.log.call_roll("w", ["never was"], 0.0, 60.0)
    assert await now.after(100.0) == []
    assert await now.entered() == []


async def test_who_ended_in_a_log_that_has_lost_it_is_not_struck_off() -> None:
    """Redis came back as it was before: nobody drives the session, and it would be said to run for ever."""
    now = Scene()
    await now.begun("ours")
    now.sweeper.note_end("w", "ours")
    assert await now.after(1.0) == []
    assert await now.after(1000.0) == [("ours", FinishReason.CANCELLED)]


async def test_who_speaks_after_a_jump_of_the_log_s_clock_lives() -> None:
    """By that clock its owner was silent for long; it is about to give its next sign of life."""

    class Jumped(UnsteadyStore):
        async def read(self, session_id: str) -> StoredSession | None:
            found = await super().read(session_id)
            await self.append(session_id, fence, Append(3, (), ()))
            return found

    now = Scene(log=Jumped())
    fence = await now.begun("lives")
    assert await now.after(1000.0) == []


async def test_no_round_waits_for_those_who_may_yet_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many models have orphans: between two rounds what is driven here would not be called, and be missed."""
    monkeypatch.setattr(sweeping, "CONFIRM_S", 1e6)
    now, orphans = Scene(), {"a", "b", "c"}
    now.sweeper.driven = lambda: {name: {f"ours-{name}"} for name in orphans}
    for name in orphans:
        await now.log.create(record_of(name, weights_fingerprint=name), 3600.0, "them")
    for _ in range(3):
        async with asyncio.timeout(LIMIT_S):
            assert await now.after(100.0) == []
    monkeypatch.setattr(sweeping, "CONFIRM_S", 0.0)
    assert set(await now.after(1.0)) == {(name, FinishReason.CANCELLED) for name in orphans}
    assert await now.after(1000.0) == []


async def test_who_was_silent_before_the_log_was_is_looked_at_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a silence of the log nobody can have spoken."""
    monkeypatch.setattr(sweeping, "CONFIRM_S", 1e6)
    now = Scene()
    await now.begun("s")
    assert await now.after(1000.0) == []
    now.sweeper._be_quiet()
    now.sweeper._quiet_until = 0.0
    monkeypatch.setattr(sweeping, "CONFIRM_S", 0.0)
    assert await now.after(1.0) == []
    assert await now.after(sweeping.AGAIN_S) == [("s", FinishReason.CANCELLED)]


async def test_who_cannot_be_ended_here_is_told_again() -> None:
    now = Scene(refusal=StatusError(grpc.StatusCode.UNAVAILABLE, "the orchestrator is stopping"))
    await now.begun("s")
    assert await now.after(1000.0) == []
    now.refusal = None
    assert await now.after(1.0) == []  # somebody else may be at it
    assert await now.after(sweeping.AGAIN_S) == [("s", FinishReason.CANCELLED)]


async def test_who_is_known_here_is_looked_at_again_later() -> None:
    """It ended here a moment ago, and the log came back as it was before: once it is forgotten, it ends once more."""
    now = Scene(known_here=True)
    await now.begun("s")
    for _ in range(3):
        assert await now.after(100.0) == [("s", FinishReason.CANCELLED)]
    now.known_here = False
    assert await now.after(100.0) == [("s", FinishReason.CANCELLED)]
    assert await now.after(100.0) == []


async def test_nobody_is_missed_before_the_log_has_answered_for_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it was silent, so was every owner; and a process that was stopped is not the only one, perhaps."""
    monkeypatch.setattr(sweeping, "ROUND_S", 0.01)
    now = Scene()
    await now.begun("s")
    now.log.late_s += 1000.0

    async def rounds(lease_s: float) -> None:
        """Three, or as many as it takes to end somebody where that is possible at all."""
        monkeypatch.setattr(sweeping, "LEASE_S", lease_s)
        now.log.asked.clear()
        task = asyncio.create_task(now.sweeper.run())
        await until(lambda: now.ended or (now.log.asked["call_roll"] > 3 and lease_s != SHORT_S))
        task.cancel()
        await asyncio.wait([task])

    await rounds(1e6)
    assert now.ended == []
    now.log.silent = {"missed"}
    await rounds(0.0)
    now.log.silent.clear()
    assert now.ended == []
    await rounds(SHORT_S)
    assert now.ended == [("s", FinishReason.CANCELLED)]


# With real orchestrators


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within fractions of a second, and the owner that does not exist need not be waited for."""
    monkeypatch.setattr(sweeping, "ROUND_S", 0.05)
    monkeypatch.setattr(sweeping, "AGAIN_S", 0.05)
    monkeypatch.setattr(sweeping, "LEASE_S", 0.2)
    monkeypatch.setattr("orchestrator.store.base.LEASE_S", 0.2)
    monkeypatch.setattr("orchestrator.store.redis.CALLED_WITHIN_S", 0.1)


async def orphan(of: Stack, store: SessionStore, tokens: int = 5, **changes: object) -> str:
    """A session of an owner that was killed after so many tokens."""
    identity = of.orchestrator.orchestrator.pool.models.all()[0].identity
    session_id, text = new_session_id(""), plain(TARGET, PROMPT, tokens)
    fields = {"sampling": Sampling(), "stopping": Stopping(4000, ignore_eos=True), "stop": (), "created": time.time()}
    known = {
        "weights_fingerprint": identity.weights,
        "vocabulary_fingerprint": identity.vocabulary,
        "tokenizer_fingerprint": identity.tokenizer,
        "eos_ids": identity.eos_ids,
    }
    record = record_of(session_id, prompt=PROMPT, tenant="", **{**fields, **known, **changes})
    fence = await store.create(record, 60.0, "dead")
    await store.append(session_id, fence, Append(len(PROMPT), tuple(text), (D,) * tokens))
    return session_id


async def ended(store: SessionStore, session_id: str) -> StoredSession:
    log = await asked(lambda: store.read(session_id), lambda told: told is None or told.reason is not None)
    assert log is not None
    return log


@pytest.mark.usefixtures("_soon")
async def test_an_orphan_ends_in_the_log_as_its_owner_would_have_ended_it(redis: RedisServer) -> None:
    """Past its deadline, or cancelled, with the length that its text has; no verifier is needed for it."""
    async with stack(redis_url=redis.url) as running_stack:
        store = running_stack.orchestrator.orchestrator.store
        for verifier in running_stack.orchestrator.orchestrator.pool.verifiers:
            verifier.refusal = "a verifier that this one may not use"
        late = await orphan(running_stack, store, deadline=time.time() - 1)
        unwanted = await orphan(running_stack, store, 3)
        waiting = await orphan(running_stack, store)
        await store.cancel(unwanted)
        for session_id, tokens, reason in ((late, 5, FinishReason.DEADLINE), (unwanted, 3, FinishReason.CANCELLED)):
            log, text = await ended(store, session_id), plain(TARGET, PROMPT, tokens)
            assert (log.reason, list(log.tokens)) == (reason, text)
            assert log.text_length == len(" ".join(map(str, text)))
            state = await running_stack.client.get_session(session_id)
            assert state.finish_reason is reason
        left = await log_of(store, waiting)
        assert left.reason is None  # somebody may come for it


@pytest.mark.usefixtures("_soon")
async def test_two_that_find_it_at_once_do_it_no_harm(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both claim it; the newest fence ends it, and no log says anything else afterwards."""
    async with stack(redis_url=redis.url) as running_stack:
        other = await running_stack.another()
        store, both = running_stack.orchestrator.orchestrator.store, (running_stack.orchestrator, other)
        session_ids = [await orphan(running_stack, store, deadline=time.time() + 3600) for _ in range(5)]
        for session_id in session_ids:
            log = await log_of(store, session_id)
            await asyncio.gather(*(each.orchestrator.end_orphan(log, FinishReason.DEADLINE) for each in both))
        logs = [await ended(store, session_id) for session_id in session_ids]
        assert {log.reason for log in logs} == {FinishReason.DEADLINE}
        assert {log.tokens for log in logs} == {tuple(plain(TARGET, PROMPT, 5))}
