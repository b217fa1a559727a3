"""Shows a session that another orchestrator drives, as it appears in the log."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from orchestrator.session.output import UNREAD, Readers, Replay
from orchestrator.store import LogTail, SessionStore, StoreUnavailable
from orchestrator.store.base import RENEW_S, missing

# Seconds between two looks at a log: while it grows; at most, while it does not (growing); after no answer.
POLL_S = 0.05
MOST_POLL_S = 0.4
LONGER = 1.5
RETRY_S = 0.2
# Seconds for which a log has answered again before its owner's silence counts: the owner could not write either.
SETTLED_S = 5.0


class NobodyDrives(Exception):
    """The session's owner is gone, and it cannot be driven here."""


class Followed(Protocol):
    """A session that is read here. See SessionView."""

    readers: Readers
    newest_fence: int
    patience_with_others: float


class Follower:
    """Extends one session's output from its log, reading what is new.

    A log can hold another text than before only under a new fence, or after a loss: then all of it is read.

    Args:
        view: counts the session's readers.
        owner: this orchestrator's name in the log.
        can_drive: sessions can be driven here now.
        timeout: seconds after which a silent log, or a session that nobody drives, is given up.

    wanted: set it to have the session claimed at the next look.
    """

    def __init__(
        self,
        store: SessionStore,
        session_id: str,
        view: Followed,
        replay: Replay,
        owner: str,
        can_drive: Callable[[], bool],
        timeout: float,
    ) -> None:
        self.wanted = False
        self._store = store
        self._session_id = session_id
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
        if log is None or not seen or (log.fence == self._fence and log.length >= self._prompt_length + seen):
            return log
        return await self._store.tail(self._session_id, 0)

    @property
    def _prompt_length(self) -> int:
        return self._replay.output.prompt_length

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
