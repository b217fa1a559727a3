"""Cancellations and deletions: acknowledged only once the log has them, and kept until the owner must have heard.

The flag in the log is what another owner hears, and what ends the session where its owner is lost. A log that is lost
before that is written again by its owner, who knows of neither, or comes back as it was before; so whoever has promised
the end says it again, for as long as the owner may take to look.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from orchestrator.output import Output
from orchestrator.store import LEASE_S, MissingSession, SessionStore, StoreError, StoreUnavailable

# Seconds between two times that it is set, and for which that is repeated: an owner that lives writes in a lease.
AGAIN_S = LEASE_S / 5
KEPT_S = 2 * LEASE_S
# Seconds after which a log that did not answer is asked again.
INSIST_EVERY_S = 0.2


class Driven(Protocol):
    """A session that is driven here, and is ending. See SessionDriver."""

    output: Output
    abandoned: bool


Say = Callable[[str], Awaitable[None]]


@dataclass(slots=True)
class _Promise:
    """say: what was said of the session. is_done: it need not be said again. until: by the loop's clock."""

    say: Say
    is_done: Callable[[], bool]
    until: float


class Cancellations:
    """What this orchestrator has promised, by session.

    Args:
        patience: seconds after which a log that does not answer is given up.
    """

    def __init__(self, store: SessionStore, patience: float) -> None:
        self._store = store
        self._patience = patience
        self._promised: dict[str, _Promise] = {}

    async def ask(self, session_id: str, driven: Driven | None = None) -> None:
        """Have the session end, whoever drives it; returns once the log has acknowledged the flag, or the end itself.

        driven: the session, where it is driven here. Should the log have lost it, its owner writes it again.

        Raises:
            MissingSession: there is no such session.
            StoreUnavailable: the log did not answer in time. The session may go on.
        """
        await self._insist(session_id, self._store.cancel, driven, lambda: _has_ended(driven))

    async def delete(self, session_id: str, driven: Driven | None = None) -> None:
        """Have the log forget the session. Arguments and what it raises are as of `ask`."""
        await self._insist(session_id, self._store.delete, driven, lambda: False)

    async def _insist(self, session_id: str, say: Say, driven: Driven | None, is_done: Callable[[], bool]) -> None:
        give_up = self._now() + self._patience
        while not is_done():
            try:
                await say(session_id)
            except (StoreUnavailable, MissingSession) as error:
                lost = isinstance(error, MissingSession) and (driven is None or driven.output.end is not None)
                if lost or self._now() > give_up:
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
        """A log that is not there may be the next time."""
        now = self._now()
        kept = ((each, promise) for each, promise in self._promised.items() if promise.until > now)
        self._promised = {each: promise for each, promise in kept if not promise.is_done()}
        await asyncio.gather(*(self._repeat(*each) for each in list(self._promised.items())))

    async def _repeat(self, session_id: str, promise: _Promise) -> None:
        """While the log is silent its owner hears nothing, either: that time does not count."""
        try:
            await promise.say(session_id)
        except StoreUnavailable:
            promise.until = self._now() + KEPT_S
        except StoreError:
            return

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _has_ended(driven: Driven | None) -> bool:
    """Its end is in the log."""
    return driven is not None and driven.output.end is not None and not driven.abandoned
