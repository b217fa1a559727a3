"""Who drives a session: claiming, following, letting go; and ends that are asked for at another orchestrator."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import grpc

from orchestrator.session.appender import message_of_append, status_of_append, store_statuses
from orchestrator.session.driver import SessionDriver, SessionHost, SessionNotice
from orchestrator.session.output import UNREAD, OtherText, Replay, SessionView
from orchestrator.store import (
    LEASE_S,
    DeletedSession,
    LogTail,
    MissingSession,
    SessionRecord,
    SessionStore,
    StoredSession,
    StoreError,
    StoreUnavailable,
)
from orchestrator.store.base import RENEW_S, missing
from specwire.core.messages import FinishReason
from specwire.core.session import OutputScanner
from specwire.rpc.errors import StatusError
from specwire.telemetry.logs import tell

# ----------------------------------------------------------------------------------------------------------------------
# Cancellations and deletions: acknowledged only once the log has them, and kept until the owner must have heard.
#
# The flag in the log is what another owner hears, and what ends the session where its owner is lost. A log that is lost
# before that comes back as it was, or its owner, who knows of neither, writes it again. So the orchestrator that
# promised the end repeats it for as long as the owner may take to look.

# Seconds between repeats of the flag, and for how long it is repeated: a living owner writes within a lease.
AGAIN_S = LEASE_S / 5
KEPT_S = 2 * LEASE_S
# Seconds after which a log that did not answer is asked again.
INSIST_EVERY_S = 0.2


Say = Callable[[str], Awaitable[None]]


@dataclass(slots=True)
class _Promise:
    """say: sets the flag again. is_done: it need not be set again. until: by the loop's clock."""

    say: Say
    is_done: Callable[[], bool]
    until: float


class Cancellations:
    """The ends that this orchestrator has promised, by session.

    Args:
        patience: seconds after which a log that does not answer is given up.
    """

    def __init__(self, store: SessionStore, patience: float) -> None:
        self._store = store
        self._patience = patience
        self._promised: dict[str, _Promise] = {}

    async def ask(self, session_id: str, driven: SessionView | None = None) -> None:
        """End the session, whoever drives it; returns once the log has acknowledged the flag, or the end itself.

        driven: the session, where it is driven here. Should the log have lost it, its owner writes it again.

        Raises:
            MissingSession: there is no such session, here nor in the log.
            StoreUnavailable: the log did not answer in time, or has lost a session that is driven here and is not
                written again yet. The session may go on.
        """
        await self._insist(session_id, self._store.cancel, driven, lambda: _has_ended(driven))

    async def delete(self, session_id: str, driven: SessionView | None = None) -> None:
        """Have the log forget the session. Arguments and what it raises are as of `ask`."""
        await self._insist(session_id, self._store.delete, driven, lambda: False)

    async def _insist(self, session_id: str, say: Say, driven: SessionView | None, is_done: Callable[[], bool]) -> None:
        give_up = self._now() + self._patience
        while not is_done():
            try:
                await say(session_id)
            except (StoreUnavailable, MissingSession) as error:
                missing, deleted = isinstance(error, MissingSession), isinstance(error, DeletedSession)
                runs_here = driven is not None and driven.output.end is None
                if self._now() > give_up and missing and runs_here and not deleted:
                    raise StoreUnavailable("the session log has lost the session") from error
                if self._now() > give_up or (missing and not runs_here):
                    raise
            else:
                self._promised[session_id] = _Promise(say, is_done, self._now() + KEPT_S)
                return
            await asyncio.sleep(INSIST_EVERY_S)

    async def run(self) -> None:
        """Repeat it, until cancelled."""
        while True:
            await asyncio.sleep(AGAIN_S)
            await self.repeat()

    async def repeat(self) -> None:
        """A missing log may be back the next time."""
        now = self._now()
        kept = ((each, promise) for each, promise in self._promised.items() if promise.until > now)
        self._promised = {each: promise for each, promise in kept if not promise.is_done()}
        await asyncio.gather(*(self._repeat(*each) for each in list(self._promised.items())))

    async def _repeat(self, session_id: str, promise: _Promise) -> None:
        """The time of a silent log does not count: the owner hears nothing either."""
        try:
            await promise.say(session_id)
        except StoreUnavailable:
            promise.until = self._now() + KEPT_S
        except StoreError:
            return

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _has_ended(driven: SessionView | None) -> bool:
    """The log has its end."""
    return driven is not None and driven.output.end is not None and not driven.abandoned


# ----------------------------------------------------------------------------------------------------------------------
# Shows a session that another orchestrator drives, as it appears in the log.

# Seconds between two looks at a log: while it grows; at most, while it does not (growing); after no answer.
POLL_S = 0.05
MOST_POLL_S = 0.4
LONGER = 1.5
RETRY_S = 0.2
# Seconds for which a log has answered again before its owner's silence counts: the owner could not write either.
SETTLED_S = 5.0


class NobodyDrives(Exception):
    """The session's owner is gone, and it cannot be driven here."""


class Follower:
    """Extends one session's output from its log, reading what is new.

    A log can hold another text than before only under a new fence, or after a loss: then all of it is read.

    Args:
        owner: this orchestrator's name in the log.
        can_drive: sessions can be driven here now.
        timeout: seconds after which a silent log, or a session that nobody drives, is given up.

    wanted: set it to have the session claimed at the next look.
    """

    def __init__(
        self,
        store: SessionStore,
        view: SessionView,
        replay: Replay,
        owner: str,
        can_drive: Callable[[], bool],
        timeout: float,
    ) -> None:
        self.wanted = False
        self._store = store
        self._session_id = view.record.session_id
        self._view = view
        self._replay = replay
        self._owner = owner
        self._can_drive = can_drive
        self._timeout = timeout
        self._now = asyncio.get_running_loop().time
        self._answered = self._read = self._grown = self._driven = self._now()
        self._settled = self._answered - SETTLED_S
        self._noted = -math.inf
        self._fence: int | None = None
        self._pause = POLL_S

    async def run(self) -> LogTail | None:
        """The log's end, shown, once the session has ended or should be driven here; None once nobody reads it here.

        Raises:
            StoreError: the log is lost, or does not answer.
            OtherText: the log contradicts what was shown.
            NobodyDrives: readers should ask another orchestrator.
        """
        while True:
            log = await self._look()
            if log is not None and (log.reason is not None or self._is_due(log)):
                return log
            self._check_driven(log)
            if self._is_unread():
                return None
            await self._note_reader()
            await asyncio.sleep(RETRY_S if log is None else self._pause)

    async def _look(self) -> LogTail | None:
        """The log's end, shown; None if it does not answer now."""
        try:
            log = await self._news()
        except StoreUnavailable:
            self._settled = self._grown = self._now()
            if self._now() - self._answered > self._timeout:
                raise
            return None
        if log is None or self._is_behind(log):
            # The store has lost it. A living owner writes it again with its next sign of life.
            if self._now() - self._answered > self._timeout:
                raise missing(self._session_id)
            return None
        self._answered, self._fence = self._now(), log.fence
        self._view.newest_fence = max(self._view.newest_fence, log.fence)
        self._pause = min(MOST_POLL_S, LONGER * self._pause)
        if log.skipped + len(log.tokens) > self._replay.seen:
            self._grown, self._pause = self._answered, POLL_S
        await self._replay.extend(log, log.skipped)
        return log

    async def _news(self) -> LogTail | None:
        """The log's unseen part; all of it where the seen part may have changed."""
        seen = self._replay.seen
        log = await self._store.tail(self._session_id, seen)
        if (
            log is None
            or not seen
            or (log.fence == self._fence and log.length >= self._replay.output.prompt_length + seen)
        ):
            return log
        return await self._store.tail(self._session_id, 0)

    def _is_behind(self, log: LogTail) -> bool:
        """The log is only the beginning of what was shown, which is no contradiction."""
        shown = self._replay.output.tokens
        end = log.skipped + len(log.tokens)
        return end < len(shown) and shown[log.skipped : end] == list(log.tokens)

    def _is_due(self, log: LogTail) -> bool:
        """Whether to claim: nobody drives it, its owner makes no progress, or a reader wants it here.

        Ending it needs no verifier.
        """
        if not (self._can_drive() or log.cancelled):
            return False
        stalled = self._now() - self._grown > self._view.patience_with_others
        if stalled:
            self._view.patience_with_others *= 2
        silent = log.abandoned and self._now() - self._settled >= SETTLED_S
        return self.wanted or stalled or silent or log.owner == self._owner

    def _check_driven(self, log: LogTail | None) -> None:
        """Count the owner's silence; that of the log says nothing about the owner. Raises NobodyDrives."""
        if log is None or not log.abandoned or self._can_drive():
            self._driven = self._now()
        if self._now() - self._driven > self._timeout:
            raise NobodyDrives("session_id: no verifier is there to go on with it, or no room")

    async def _note_reader(self) -> None:
        """Tell the owner, which may have no reader left, that there is one here."""
        if self._view.readers.count and self._now() - self._noted >= RENEW_S:
            self._noted = self._now()
            with suppress(StoreUnavailable):
                await self._store.note_reader(self._session_id)

    def _is_unread(self) -> bool:
        if self._view.readers.count:
            self._read = self._now()
        return self._now() - self._read > UNREAD


# ----------------------------------------------------------------------------------------------------------------------
# Who drives a session: this orchestrator, or another one whose work is shown here as it appears in the log.
#
# Any orchestrator with the same log serves any session. One that has ended is replayed. One that another orchestrator
# drives is *followed*: its log is polled, so that any number of readers at any number of orchestrators see the same
# stream. It is *claimed*, with a new fence, and driven here
#
# - at once if the reader asks for it (its connection to the other orchestrator broke), or if nobody drives it;
# - once the other one gives no sign of life (the log's lease), or the log has not grown for as long, which may be
#   because nobody reads there any more. The second kind of patience doubles each time, so that two orchestrators with
#   readers do not take a session that cannot go on from each other for ever.
#
# A claim is right at any time: it makes the former owner's appends fail. That one then follows.

logger = logging.getLogger(__name__)

MICROSECONDS = 1_000_000


def must_end(log: StoredSession) -> FinishReason | None:
    """Why a session that still runs in the log must end before any further token; None if it may go on."""
    if log.cancelled:
        return FinishReason.CANCELLED
    return FinishReason.DEADLINE if 0 < log.record.deadline <= time.time() else None


def known_here(view: SessionView) -> tuple[int, int]:
    """For a claim's fence: the newest one of the session that is known here, and this host's time in microseconds."""
    return view.newest_fence, int(time.time() * MICROSECONDS)


class Ownership:
    """Joins sessions that began at other orchestrators.

    Args:
        host: is told of sessions that are claimed, or no longer read.
        scanner_of: a fresh scanner for a session; StatusError if this orchestrator cannot serve it.
        unfit: for people, why a session cannot be driven here; None where there is a verifier, and room for the tenant.
    """

    def __init__(
        self,
        host: SessionHost,
        scanner_of: Callable[[SessionRecord], OutputScanner],
        unfit: Callable[[SessionRecord], str | None],
    ) -> None:
        self._host = host
        self._store = host.store
        self._owner = host.owner
        # Seconds after which readers' streams end if the log is silent, or if nobody drives the session.
        self._store_timeout = host.options.store_timeout
        self._scanner_of = scanner_of
        self._unfit = unfit
        self._followers: dict[str, Follower] = {}

    async def join(
        self, driver: SessionDriver, log: StoredSession, take_over: bool, end: FinishReason | None = None
    ) -> None:
        """Let `driver`, which has shown nothing yet, show the session from now on.

        end: nobody continues the session; it ends for this reason.

        Raises:
            StatusError: the log does not answer, or has lost the session; or it would have to be driven here, and
            cannot be.
        """
        driver.let_go()
        driver.view.stats.started -= max(0.0, time.time() - log.record.created)
        replay = self._replay(driver)
        with store_statuses():
            if log.reason is None and (take_over or self._is_free(log)):
                unfit = self._unfit(log.record)
                if unfit is not None and not (end or must_end(log)):
                    raise StatusError(grpc.StatusCode.UNAVAILABLE, f"session_id: {unfit}")
                log = await self._store.claim(log.record.session_id, self._owner, *known_here(driver.view))
        await self._show(driver, replay, log, end)

    def follow(self, driver: SessionDriver) -> None:
        """Another orchestrator has claimed a session of ours."""
        self._follow(driver, self._replay(driver))

    def take_over(self, driver: SessionDriver) -> None:
        """A reader of a session that is followed here wants it to be driven here."""
        follower = self._followers.get(driver.view.record.session_id)
        if follower is not None:
            follower.wanted = True

    def _replay(self, driver: SessionDriver) -> Replay:
        return Replay(driver.view.output, self._scanner_of(driver.view.record))

    def _is_free(self, log: StoredSession) -> bool:
        """Nobody drives the session: its owner is silent, or we own it and have left it."""
        return log.abandoned or log.owner == self._owner

    async def _show(
        self, driver: SessionDriver, replay: Replay, log: StoredSession, end: FinishReason | None = None
    ) -> None:
        """Do what the log says; go on driving where it names us as the owner."""
        await replay.extend(log)
        if driver.view.output.end is not None:
            return  # this orchestrator has let go of it meanwhile: others may claim it
        if log.reason is not None:
            self._finish(driver, replay, log.reason, log.text_length)
        elif log.owner == self._owner:
            self._drive(driver, replay, log, end or must_end(log))
        else:
            self._follow(driver, replay)

    def _finish(self, driver: SessionDriver, replay: Replay, reason: FinishReason, text_length: int) -> None:
        if driver.view.output.end is None:
            driver.finish(replay.end(reason, text_length))

    def _drive(self, driver: SessionDriver, replay: Replay, log: StoredSession, end: FinishReason | None) -> None:
        tell(logger, log.record.session_id, "claimed at %d tokens", log.length)
        driver.view.span.event("claimed", position=log.length)
        driver.drive(log.fence, replay.scanner, log.retention_s)
        if end is not None:
            driver.end(end)
            return
        if log.record.deadline:
            driver.set_deadline(max(0.0, log.record.deadline - time.time()))
        if driver.view.readers.count == 0:
            driver.view.readers.expect()
        driver.verifying.wait()
        self._host.notice(driver, SessionNotice.CLAIMED)

    def _follow(self, driver: SessionDriver, replay: Replay) -> None:
        view, timeout = driver.view, self._store_timeout
        follower = Follower(self._store, view, replay, self._owner, lambda: self._unfit(view.record) is None, timeout)
        self._followers[view.record.session_id] = follower
        driver.follow(self._run(driver, replay, follower))

    async def _run(self, driver: SessionDriver, replay: Replay, follower: Follower) -> None:
        """Follow until the session has ended, is driven here, or nobody has read it here for a while."""
        session_id = driver.view.record.session_id
        try:
            tail = await follower.run()
            if tail is None:
                self._host.notice(driver, SessionNotice.UNREAD)
            elif tail.reason is not None:
                self._finish(driver, replay, tail.reason, tail.text_length)
            else:
                await self._show(driver, replay, await self._claim(driver))
        except OtherText as error:
            driver.abandon(grpc.StatusCode.DATA_LOSS, f"session log: {error}")
        except NobodyDrives as error:
            driver.abandon(grpc.StatusCode.UNAVAILABLE, str(error))
        except StoreError as error:
            driver.abandon(status_of_append(error), message_of_append(error))
        finally:
            if self._followers.get(session_id) is follower:
                del self._followers[session_id]

    async def _claim(self, driver: SessionDriver) -> StoredSession:
        """Claim; returns the log under our fence. A claim of unknown outcome is repeated: a newer fence does no
        harm.
        """
        give_up = asyncio.get_running_loop().time() + self._store_timeout
        while True:
            try:
                return await self._store.claim(driver.view.record.session_id, self._owner, *known_here(driver.view))
            except StoreUnavailable:
                if asyncio.get_running_loop().time() > give_up:
                    raise
            await asyncio.sleep(RETRY_S)
