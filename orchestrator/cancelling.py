"""Cancellations of sessions that others drive: acknowledged as soon as the log has taken them, and kept until heard.

The flag in the log is what the owner hears. A log that is lost before that is written again by its owner, who does not
know of the flag; so whoever has promised the end sets it again, for as long as the owner may take to look.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from orchestrator.store import LEASE_S, SessionStore, StoreError

# Seconds between two times that it is set, and for which that is repeated: an owner that lives writes in a lease.
AGAIN_S = LEASE_S / 5
KEPT_S = 2 * LEASE_S


class Cancellations:
    """What this orchestrator has promised, by session."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._until: dict[str, float] = {}

    async def ask(self, session_id: str) -> None:
        """Have the session's owner end it. Raises as `SessionStore.cancel`."""
        await self._store.cancel(session_id)
        self._until[session_id] = asyncio.get_running_loop().time() + KEPT_S

    async def run(self) -> None:
        """Repeat it, until cancelled."""
        while True:
            await asyncio.sleep(AGAIN_S)
            await self.repeat()

    async def repeat(self) -> None:
        """A log that is not there, or does not answer, may be the next time."""
        now = asyncio.get_running_loop().time()
        self._until = {session_id: until for session_id, until in self._until.items() if until > now}
        for session_id in list(self._until):
            with suppress(StoreError):
                await self._store.cancel(session_id)
