"""Ends orphans: sessions whose owner is gone and that nobody asks for.

An owner ends its sessions itself: at their deadline, when the grace without a reader is over, when they are cancelled.
An owner that was killed does none of it, and its sessions would seem to run until the log forgets them. So owners enter
their sessions in the model's roll (`orchestrator.store.base`), and every orchestrator of that model asks the roll which
ones are overdue, and reads the log of each:

- cancelled, or past its deadline: it ends so;
- its owner is silent for so long that neither the owner (it would have given its readers up by now) nor a reader (the
grace is over) can come back: it ends as cancelled;
- else it is left for readers that come back, and looked at again.

Ending a session means claiming it: should its owner live after all, or two orchestrators find it at once, the newest
fence wins. A log that did not answer makes every owner silent, so nobody is missed before the log has answered, and
this process was awake, for a lease. A jump of the log's clock does so, too: a session that seems silent is looked at
again in a later round, by when a living owner has written.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from orchestrator.ownership import must_end
from orchestrator.store import LEASE_S, DamagedLog, DeletedSession, SessionStore, StoredSession, StoreError
from orchestrator.store.base import CALLED_WITHIN_S, NONE_OF_IT, awake_or_asleep_s
from specwire.core.messages import FinishReason
from specwire.rpc.errors import StatusError
from specwire.telemetry.logs import tell

logger = logging.getLogger(__name__)

# Seconds between two rounds, scattered by half, so that orchestrators do not all ask at once.
ROUND_S = CALLED_WITHIN_S / 3
# Seconds for one round. Sessions that it does not reach are told again, here or elsewhere.
ROUND_LIMIT_S = 30.0
# Seconds after which a session that was missed, and not ended, is told to somebody again.
AGAIN_S = LEASE_S
# Seconds within which a living owner gives a sign of life: one and a half renewals, and a margin.
CONFIRM_S = 0.6 * LEASE_S
# Sessions in one round: their logs are read whole.
MOST_AT_ONCE = 32

Rolls = dict[str, set[str]]


@dataclass(slots=True)
class Sweeper:
    """Enters sessions in the roll, and asks it, until `run` is cancelled.

    Args:
        driven: by model (its weights' fingerprint) the sessions that are driven here; the models that are served are
            named, also without sessions.
        end: ends a session whose log was as given; returns whether it did. Raises StatusError.
        owner_s: how long an owner that does not reach the log keeps its sessions. reader_s: how long a session with a
            request id waits for a reader.
        kept: seconds for which the log keeps a running session, and so the roll.
    """

    store: SessionStore
    driven: Callable[[], Rolls]
    end: Callable[[StoredSession, FinishReason], Awaitable[bool]]
    owner_s: float
    reader_s: float
    kept: float
    _ended: Rolls = field(default_factory=dict)
    # By roll: the sessions to end, and since when that is known, by the loop's clock.
    _suspects: dict[str, dict[str, float]] = field(default_factory=dict)
    _scatter: random.Random = field(default_factory=lambda: random.Random())
    _quiet_until: float = 0.0

    async def run(self) -> None:
        """Run rounds for ever. The first ones only enter sessions, and ask for none."""
        self._be_quiet()
        while True:
            began = awake_or_asleep_s()
            pause = ROUND_S * self._scatter.uniform(0.5, 1.0)
            await asyncio.sleep(pause)
            if awake_or_asleep_s() - began > pause + LEASE_S / 2:
                self._be_quiet()  # this process was stopped, and others perhaps, too
            try:
                async with asyncio.timeout(ROUND_LIMIT_S):
                    await self.round()
            except (StoreError, TimeoutError):
                self._be_quiet()
            except Exception as error:
                logger.error("orphans could not be looked for", exc_info=error)

    def _be_quiet(self) -> None:
        """Look after nobody for a lease: silent owners may be about to write."""
        self._quiet_until = asyncio.get_running_loop().time() + LEASE_S
        self._suspects.clear()

    async def round(self) -> None:
        """Enter sessions driven here, remove ended ones, look after missed ones. Raises StoreError."""
        driven = self.driven()
        for roll, sessions in driven.items():
            await self.store.call_roll(roll, sorted(sessions), CALLED_WITHIN_S, self.kept)
        ended, self._ended = self._ended, {}
        for roll, sessions in ended.items():
            await self._strike(roll, sorted(sessions))
        self._suspects = {roll: self._suspects.get(roll, {}) for roll in driven}
        for roll in driven:
            await self._look_for_missed(roll, driven[roll])

    def note_end(self, roll: str, session_id: str) -> None:
        """Note that the log has the session's end: it is no longer entered in the roll."""
        self._ended.setdefault(roll, set()).add(session_id)

    async def _strike(self, roll: str, session_ids: Sequence[str]) -> None:
        """Remove sessions whose end the log has. One whose end is lost will be missed. Raises StoreError."""
        found = await asyncio.gather(*map(self._has_end, session_ids), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        over = [session_id for session_id, ended in zip(session_ids, found, strict=True) if ended]
        if over:
            await self.store.strike(roll, over)

    async def _has_end(self, session_id: str) -> bool:
        """Whether the session no longer runs, by the log. Raises StoreError."""
        try:
            log = await self.store.tail(session_id, NONE_OF_IT)
        except (DeletedSession, DamagedLog):
            return True
        return log is None or log.reason is not None

    async def _look_for_missed(self, roll: str, driven: set[str]) -> None:
        if asyncio.get_running_loop().time() < self._quiet_until:
            return
        suspects = self._suspects[roll]
        for session_id in await self.store.missed(roll, AGAIN_S, MOST_AT_ONCE):
            if session_id not in driven and await self._is_due(roll, session_id):
                suspects.setdefault(session_id, asyncio.get_running_loop().time())
        await self._confirm(roll, driven)

    async def _confirm(self, roll: str, driven: set[str]) -> None:
        """Look again at sessions whose owners have had time to speak, without holding up the next round."""
        suspects, before = self._suspects[roll], asyncio.get_running_loop().time() - CONFIRM_S
        for session_id in [each for each, since in suspects.items() if since <= before]:
            del suspects[session_id]
            if session_id not in driven and await self._is_over(session_id):
                await self.store.strike(roll, [session_id])

    async def _is_due(self, roll: str, session_id: str) -> bool:
        """Whether the session must end now, by its log; one that is over is removed from the roll."""
        log = await self._running(session_id)
        if log is None:
            await self.store.strike(roll, [session_id])
        return log is not None and self.due(log) is not None

    async def _is_over(self, session_id: str) -> bool:
        """Whether the session has ended by now, or is gone."""
        log = await self._running(session_id)
        if log is None:
            return True
        reason = self.due(log)
        return reason is not None and await self._end(log, reason)

    async def _running(self, session_id: str) -> StoredSession | None:
        """Its log; None if it has ended, or nobody can read it."""
        try:
            log = await self.store.read(session_id)
        except (DeletedSession, DamagedLog):
            return None
        return log if log is not None and log.reason is None else None

    def due(self, log: StoredSession) -> FinishReason | None:
        """Why a session that runs in the log must end now; None if its owner lives, or somebody may come for it."""
        if not log.abandoned:
            return None
        grace_s = max(self.owner_s, self.reader_s if log.record.request_id else 0.0)
        return must_end(log) or (FinishReason.CANCELLED if log.silent_s > LEASE_S + grace_s else None)

    async def _end(self, log: StoredSession, reason: FinishReason) -> bool:
        tell(logger, log.record.session_id, "its owner is gone; to end (%s)", reason.name.lower())
        try:
            return await self.end(log, reason)
        except StatusError as error:
            tell(logger, log.record.session_id, "not ended: %s", error)
            return False
