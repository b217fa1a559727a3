"""What becomes of an append when the log answers late, not at all, or has lost something."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from orchestrator.session import appender as module
from orchestrator.session.appender import Appender, Lifetimes
from orchestrator.store import LEASE_S, ContentMismatch, Fenced, MissingSession, StoreUnavailable
from orchestrator.store.sqlite import SqliteStore
from specwire.core.messages import Append, End, FinishReason, Outcome, TokenLogprobs
from tests.orchestrator.test_store import UnsteadyStore, alter, log_of, lose_logs, record_of, replace_output
from tests.wait import raised

A = Outcome.ACCEPTED
LIFETIMES = Lifetimes(60.0, 30.0)


@dataclass
class Output:
    tokens: list[int] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Scene:
    """An owner whose acknowledged appends go into `output`, as the driver does it."""

    def __init__(self, store: SqliteStore, fence: int, timeout: float, clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self.fence = fence
        self.output = Output()
        self.record = record_of("s")
        self.appender = Appender(store, self.record, fence, self.output, "me", LIFETIMES, timeout, clock)

    async def write(self, *tokens: int, end: End | None = None) -> bool:
        outcomes = (A,) * len(tokens)
        cancelled = await self.appender.write(Append(3 + len(self.output.tokens), tokens, outcomes, end))
        self.output.tokens += tokens
        self.output.outcomes += outcomes
        return cancelled

    async def logged(self) -> tuple[int, ...]:
        log = await log_of(self.store, "s")
        assert len(log.outcomes) == len(log.tokens)
        return log.tokens


async def scene(
    store: SqliteStore | None = None, timeout: float = 30.0, clock: Callable[[], float] = time.time
) -> Scene:
    used = store or SqliteStore()
    return Scene(used, await used.create(record_of("s"), 60.0, "me", 30.0), timeout, clock)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.001)


async def test_a_log_that_does_not_answer_is_given_up() -> None:
    store = UnsteadyStore()
    played = await scene(store, timeout=0.01)
    store.lost_before = 1_000_000
    await raised(StoreUnavailable, played.write(7))


async def test_a_log_that_refuses_a_sessions_first_tokens_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFUSED_S", 0.0)
    store = UnsteadyStore()
    played = await scene(store, timeout=30.0)
    store.lost_before, store.refuses = 1, True
    await raised(StoreUnavailable, played.write(7), "lost before")
    await played.write(7)
    store.lost_before = 3
    store.asked.clear()
    await played.write(8)
    assert await played.logged() == (7, 8)
    assert store.asked["append"] == 4


async def test_a_lost_log_is_written_again_with_all_that_belongs_to_it() -> None:
    store = SqliteStore()
    played = await scene(store)
    await played.write(7, 8)
    lose_logs(store)
    alter(store, "DELETE FROM requests")
    await played.write(9)
    log = await log_of(store, "s")
    assert (log.record, log.fence, log.owner, log.tokens) == (played.record, played.fence, "me", (7, 8, 9))
    assert alter(store, "SELECT ttl_s, retention_s FROM sessions") == [(60.0, 30.0)]
    assert (await store.bind_request(played.record.tenant, played.record.request_id, "other", 60.0)).session_id == "s"


async def test_its_request_id_stands_for_it_as_long_as_it_is_kept_after_its_end() -> None:
    store = UnsteadyStore()
    played = await scene(store)
    lose_logs(store)
    alter(store, "DELETE FROM requests")
    await played.write(7)
    store.late_s = 50.0
    await played.write(8, end=End(FinishReason.LENGTH, "", 2))
    store.late_s = 75.0
    assert await played.logged() == (7, 8)
    assert (await store.bind_request(played.record.tenant, played.record.request_id, "other", 60.0)).session_id == "s"


class Forgetful(SqliteStore):
    """Loses everything, as often as told, as soon as a log is written again."""

    losses = 0

    async def recreate(self, *log: Any) -> None:
        await super().recreate(*log)
        if self.losses:
            self.losses -= 1
            lose_logs(self)


async def test_a_log_that_is_lost_while_it_is_mended_is_mended_again() -> None:
    store = Forgetful()
    played = await scene(store)
    await played.write(7, 8)
    lose_logs(store)
    store.losses = 2
    await played.write(9)
    assert await played.logged() == (7, 8, 9)


async def test_a_log_that_is_lost_for_ever_is_given_up() -> None:
    store = Forgetful()
    played = await scene(store)
    lose_logs(store)
    store.losses = 1_000_000
    await raised(MissingSession, played.write(7))


async def test_a_log_that_came_back_shorter_gets_its_tail() -> None:
    store = SqliteStore()
    played = await scene(store)
    await played.write(7, 8, 9)
    replace_output(store, "s", 7)
    await played.write(10)
    assert await played.logged() == (7, 8, 9, 10)


@pytest.mark.parametrize("meanwhile", [False, True])
async def test_a_log_that_came_back_from_before_the_claim_is_written_again(meanwhile: bool) -> None:
    """Unless the former owner has written otherwise meanwhile: its readers have seen that."""
    store = SqliteStore()
    former = await scene(store)
    await former.write(7)
    claimed = await store.claim("s", "me")
    present = Scene(store, claimed.fence, 30.0)
    present.output = former.output
    present.appender = Appender(store, present.record, claimed.fence, present.output, "me", LIFETIMES, 30.0)
    alter(store, "UPDATE sessions SET fence = ?", former.fence)
    replace_output(store, "s", *((1, 1) if meanwhile else ()))
    if meanwhile:
        await raised(ContentMismatch, present.write(8))
        assert await present.logged() == (1, 1)
        return
    await present.write(8)
    assert await present.logged() == (7, 8)
    await raised(Fenced, former.write(9))


async def test_who_was_asleep_for_longer_than_a_lease_does_not_bring_a_forgotten_session_back() -> None:
    clock = [1000.0]
    store = UnsteadyStore()
    played = await scene(store, clock=lambda: clock[0])
    await played.write(7)
    clock[0] += LEASE_S + 1
    lose_logs(store)
    store.lost_before = 2
    await raised(MissingSession, played.write(8))
    assert await store.read("s") is None


@pytest.mark.parametrize("away_s", [LEASE_S + 1, LIFETIMES.ended + 1], ids=["asleep", "cut off"])
async def test_who_was_away_goes_on_where_the_log_is_still_its_own(away_s: float) -> None:
    clock = [1000.0]
    store = SqliteStore()
    played = await scene(store, clock=lambda: clock[0])
    clock[0] += away_s
    await played.write(7)
    lose_logs(store)
    await played.write(8)
    assert await played.logged() == (7, 8)


async def test_who_was_cut_off_for_less_writes_a_lost_log_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    store = UnsteadyStore()
    played = await scene(store, clock=lambda: clock[0])
    await played.write(7)
    for _ in range(9):
        clock[0] += 3.0
        store.lost_before = 1
        monkeypatch.setattr(module, "RENEW_S", 0.0)
        await raised(StoreUnavailable, played.appender.renew())
    lose_logs(store)
    await played.write(8)
    assert await played.logged() == (7, 8)


async def test_a_sign_of_life_is_given_where_no_write_was_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store = UnsteadyStore()
    played = await scene(store)
    await played.write(7)
    assert not await played.appender.renew()
    assert store.asked["append"] == 1
    monkeypatch.setattr(module, "RENEW_S", 0.0)
    await store.cancel("s")
    assert await played.appender.renew()
    assert store.asked["append"] == 2


async def test_a_sign_of_life_never_meets_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEW_S", 0.0)
    store = UnsteadyStore()
    played = await scene(store)
    store.lost_before = 2
    writing = asyncio.create_task(played.write(7))
    await asyncio.sleep(0)
    assert not await played.appender.renew()
    await writing
    assert await played.logged() == (7,)


async def test_an_end_meets_a_lost_log() -> None:
    store = SqliteStore()
    played = await scene(store)
    await played.write(7)
    lose_logs(store)
    assert not await played.write(8, end=End(FinishReason.EOS, "", 2))
    log = await log_of(store, "s")
    assert (log.tokens, log.reason, log.text_length) == ((7, 8), FinishReason.EOS, 2)
