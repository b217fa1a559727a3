"""What an orchestrator makes of a log that another one writes: it shows, waits, claims, or leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from unittest.mock import patch

import pytest

from orchestrator import ownership as following
from orchestrator.ownership import Follower, NobodyDrives
from orchestrator.session.output import UNREAD, OtherText, Replay, SessionView
from orchestrator.store import LEASE_S, LogTail, MissingSession, SessionRecord, StoreUnavailable
from specwire.core.law.sampling import Sampling
from specwire.core.messages import Append, End, FinishReason, Outcome
from specwire.core.text import Stopping
from specwire.telemetry.tracing import NO_SPAN
from tests.core.script import LetterScanner
from tests.orchestrator.test_store import UnsteadyStore, alter, lose_logs
from tests.wait import raised, until

RECORD = SessionRecord("s", (1, 2), Sampling(), Stopping(max_tokens=9))
TTL_S, TIMEOUT_S = 60.0, 5.0
D = Outcome.DIRECT


def shown_here() -> SessionView:
    """It has one reader until a test says otherwise."""
    view = SessionView(RECORD, NO_SPAN, 0.0, lambda: None, lambda _: None)
    view.readers.count = 1
    return view


class Log(UnsteadyStore):
    """read_of_it: how many tokens were skipped, and how many were there, at each look."""

    def __init__(self) -> None:
        super().__init__()
        self.read_of_it: list[tuple[int, int]] = []

    async def tail(self, session_id: str, skipped: int) -> LogTail | None:
        tail = await super().tail(session_id, skipped)
        if tail is not None:
            self.read_of_it.append((skipped, len(tail.tokens)))
        return tail


class Scene:
    """A session that another orchestrator has begun, and who follows it here, by a clock that a test moves."""

    def __init__(self, log: Log, fence: int) -> None:
        self.log = log
        self.fence = fence
        self.session = shown_here()
        self.can_drive = True
        self.output = self.session.output
        replay = Replay(self.output, LetterScanner(()))
        self.now = 0.0
        with patch.object(asyncio.get_running_loop(), "time", lambda: self.now):
            self.follower = Follower(log, self.session, replay, "us", lambda: self.can_drive, TIMEOUT_S)
        self.task = asyncio.create_task(self.follower.run())

    async def append(self, *tokens: int) -> None:
        await self.log.append("s", self.fence, Append(2 + len(self.output.tokens), tokens, (D,) * len(tokens)))
        await self.shown(len(self.output.tokens) + len(tokens))

    async def shown(self, tokens: int) -> None:
        async with asyncio.timeout(60.0):
            await self.output.reached(2 + tokens)

    async def goes_on(self) -> None:
        """It has looked at the log a few times and is still at it."""
        enough = self.log.asked["tail"] + 5
        await until(lambda: self.log.asked["tail"] >= enough or self.task.done())
        assert not self.task.done()

    async def result(self) -> LogTail | None:
        async with asyncio.timeout(60.0):
            return await self.task


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "POLL_S", 0.002)
    monkeypatch.setattr(following, "RETRY_S", 0.002)


async def scene() -> Scene:
    log = Log()
    return Scene(log, await log.create(RECORD, TTL_S, "them"))


async def test_only_what_is_new_is_read() -> None:
    now = await scene()
    await now.append(3, 1, 2)
    await now.append(4)
    await now.goes_on()
    assert sum(tokens for _, tokens in now.log.read_of_it) == 4
    assert len(now.log.read_of_it) > 4
    now.task.cancel()


async def test_all_is_read_where_it_may_have_changed() -> None:
    """The log was lost, and another owner has written it again: behind the same beginning it is another text."""
    now = await scene()
    await now.append(3, 1, 2)
    lose_logs(now.log)
    await now.log.recreate(RECORD, Append(2, (3, 7, 2, 2), (D,) * 4), now.fence + 1, TTL_S, "other")
    await raised(OtherText, now.result())


async def test_a_claim_that_the_log_lost_is_remembered() -> None:
    now = await scene()
    await now.append(3)
    fence = (await now.log.claim("s", "other", 1 << 51)).fence
    await now.goes_on()
    alter(now.log, "UPDATE sessions SET fence = ?", now.fence)
    await now.append(4)
    assert now.session.newest_fence == fence
    now.task.cancel()


async def test_a_log_that_lost_its_end_is_waited_for() -> None:
    now = await scene()
    await now.append(3, 1, 2)
    await now.log.recreate(RECORD, Append(2, (3, 1), (D,) * 2), now.fence + 1, TTL_S, "them")
    await now.goes_on()
    await now.log.append("s", now.fence + 1, Append(4, (2, 4), (D,) * 2))
    await now.shown(4)
    assert now.output.tokens == [3, 1, 2, 4]
    now.task.cancel()


async def test_a_log_that_does_not_grow_is_looked_at_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(following, "MOST_POLL_S", 0.004)
    now = await scene()
    tail = now.log.tail

    async def noted(session_id: str, skipped: int) -> LogTail | None:
        waits.append(now.follower._pause)  # what it has waited for
        return await tail(session_id, skipped)

    monkeypatch.setattr(now.log, "tail", noted)
    await now.append(3)
    await now.goes_on()
    assert (min(waits), max(waits), waits[-1]) == (following.POLL_S, 0.004, 0.004)
    del waits[:]
    await now.append(4)
    await now.goes_on()
    assert following.POLL_S in waits
    now.task.cancel()


@pytest.mark.parametrize("why", ["a reader wants it", "its owner is silent", "it is ours already"])
async def test_it_is_claimed(why: str) -> None:
    now = await scene()
    if why == "it is ours already":
        await now.log.claim("s", "us")
    else:
        await now.goes_on()
        now.follower.wanted = why == "a reader wants it"
        now.log.late_s = LEASE_S + 1 if why == "its owner is silent" else 0.0
    due = await now.result()
    assert due is not None
    assert due.reason is None


async def test_one_that_gets_no_further_is_claimed_and_the_next_time_later() -> None:
    now = await scene()
    now.session.patience_with_others = 20.0
    await now.goes_on()
    now.now = 21.0
    assert await now.result() is not None
    assert now.session.patience_with_others == 40.0


async def test_without_a_verifier_nothing_is_claimed_but_what_is_to_end() -> None:
    now = await scene()
    now.can_drive = False
    now.follower.wanted = True
    now.log.late_s = LEASE_S + 1
    await now.goes_on()
    await now.log.cancel("s")
    due = await now.result()
    assert due is not None
    assert due.cancelled


async def test_the_owner_learns_that_somebody_reads_here() -> None:
    now = await scene()
    await until(lambda: alter(now.log, "SELECT read FROM sessions") != [(None,)])
    now.session.readers.count = 0
    alter(now.log, "UPDATE sessions SET read = NULL")
    await now.goes_on()
    assert alter(now.log, "SELECT read FROM sessions") == [(None,)]
    await now.log.append("s", now.fence, Append(2, (), (), End(FinishReason.LENGTH, "", 0)))
    await now.result()


def undrivable(now: Scene) -> None:
    now.can_drive, now.log.late_s = False, LEASE_S + 1


def silent(now: Scene) -> None:
    now.log.silent = {"tail"}


def lost(now: Scene) -> None:
    now.log.late_s = 2 * TTL_S


@pytest.mark.parametrize(
    ("hurt", "error"), [(undrivable, NobodyDrives), (silent, StoreUnavailable), (lost, MissingSession)]
)
async def test_what_cannot_go_on_is_given_up(hurt: Callable[[Scene], None], error: type[Exception]) -> None:
    """Not at once: an owner that lives writes a lost log again."""
    now = await scene()
    hurt(now)
    await now.goes_on()
    now.now = TIMEOUT_S + 1
    await raised(error, now.result())


async def test_what_another_one_drives_is_followed_without_a_verifier_for_as_long() -> None:
    now = await scene()
    now.can_drive = False
    for token in range(3):
        now.now += TIMEOUT_S + 1
        await now.goes_on()
        await now.append(token)
    now.task.cancel()


async def test_silence_of_the_log_is_not_the_owners() -> None:
    now = await scene()
    now.log.silent = {"tail"}
    await now.goes_on()
    now.log.late_s = LEASE_S + 1
    now.log.silent.clear()
    await now.append(3)
    now.log.late_s += LEASE_S + 1
    now.now += following.SETTLED_S / 2
    await now.goes_on()
    now.task.cancel()


async def test_what_nobody_reads_is_left() -> None:
    now = await scene()
    await now.goes_on()
    now.session.readers.count = 0
    await now.goes_on()
    now.now = UNREAD + 1
    assert await now.result() is None
