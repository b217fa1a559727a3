"""The sessions that are known here: just being opened, driven, followed, or over since a moment ago."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from contextlib import suppress

import grpc

from orchestrator.driver import SessionDriver
from orchestrator.sweeping import Rolls
from specwire.rpc.errors import StatusError

# What of ended sessions is remembered here, beside the log: how many, and for how many seconds.
FINISHED_KEPT = 256
REMEMBERED_S = 60.0
# Seconds for the last append of a session that is cancelled at shutdown.
LEAVE_LIMIT = 2.0


class KnownSessions:
    """`sessions`: those whose opening is done, by id.

    Args:
        patience: seconds that a caller waits for a session to be opened.
    """

    def __init__(self, patience: float) -> None:
        self.sessions: dict[str, SessionDriver] = {}
        self._patience = patience
        self._opening: dict[str, asyncio.Task[SessionDriver]] = {}

    async def find(self, session_id: str) -> SessionDriver | None:
        """The session's driver, also where another call is just opening it. Raises as `open`."""
        opening = self._opening.get(session_id)
        if opening is not None:
            return await self._opened(opening)
        driver = self.sessions.get(session_id)
        return None if driver is None or driver.abandoned else driver

    def knows(self, session_id: str) -> bool:
        """It is driven or shown here, or is just being opened."""
        driver = self.sessions.get(session_id)
        return session_id in self._opening or (driver is not None and not driver.abandoned)

    # Opening

    async def open(self, session_id: str, coroutine: Coroutine[None, None, SessionDriver]) -> SessionDriver:
        """Have `coroutine` open the session; whoever looks for it meanwhile waits for the same.

        Its caller's leaving does not interrupt this: the log would hold a session that nobody drives.

        Raises:
            StatusError: `coroutine`'s; UNAVAILABLE, the log does not answer in time.
        """
        task = asyncio.create_task(coroutine)
        self._opening[session_id] = task
        task.add_done_callback(lambda done: self._begun(session_id, done))
        return await self._opened(task)

    def _begun(self, session_id: str, done: asyncio.Task[SessionDriver]) -> None:
        """Whoever waits for it is told how it went; where nobody does any more, a failure is nobody's."""
        del self._opening[session_id]
        if not done.cancelled():
            done.exception()

    async def _opened(self, opening: asyncio.Task[SessionDriver]) -> SessionDriver:
        try:
            async with asyncio.timeout(self._patience):
                return await asyncio.shield(opening)
        except TimeoutError:
            message = f"the session log did not take the session within {self._patience:g} s"
            raise StatusError(grpc.StatusCode.UNAVAILABLE, message) from None

    # Which there are

    def driven(self, models: Iterable[str]) -> Rolls:
        """The running sessions that are driven here, by model; `models`, those served, are named in any case."""
        rolls: Rolls = {model: set() for model in models}
        for session_id, driver in self.sessions.items():
            if driver.output.end is None and not driver.following:
                rolls.setdefault(driver.record.weights_fingerprint, set()).add(session_id)
        return rolls

    def over_for(self, seconds: float) -> list[SessionDriver]:
        """Those that ended longer ago, and than what is remembered."""
        now, kept = asyncio.get_running_loop().time(), min(REMEMBERED_S, seconds)
        drivers = [driver for driver in self.sessions.values() if driver.output.end is not None]
        return [each for each in drivers if each.stats.ended is not None and now - each.stats.ended > kept]

    def forget(self, driver: SessionDriver) -> None:
        """Unless the session has another driver by now."""
        if self.sessions.get(driver.record.session_id) is driver:
            del self.sessions[driver.record.session_id]

    def forget_oldest(self) -> None:
        """Of those that are over."""
        ended = [session_id for session_id, driver in self.sessions.items() if driver.output.end is not None]
        for session_id in ended[: max(0, len(ended) - FINISHED_KEPT)]:
            del self.sessions[session_id]

    # Leaving them

    async def drain(self, grace: float) -> None:
        """Give what is driven here, or is just about to be, `grace` seconds to end; then leave the rest to others."""
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._all_ended()
        await self._leave()

    async def _all_ended(self) -> None:
        opening = list(self._opening.values())
        if opening:
            await asyncio.wait(opening)
        for driver in list(self.sessions.values()):
            if not driver.following:
                await driver.output.ended()

    async def leave(self) -> list[SessionDriver]:
        """Open nothing more, and leave what runs to others; all that were known, to be closed."""
        opening = list(self._opening.values())
        for each in opening:
            each.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        await self._leave()
        return list(self.sessions.values())

    async def _leave(self) -> None:
        drivers = list(self.sessions.values())
        for driver in drivers:
            driver.leave()
        await asyncio.gather(*(driver.ended(timeout=LEAVE_LIMIT) for driver in drivers))
