"""Whether the session log takes writes: checked every second, also while nothing else is written."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import grpc

from orchestrator.store import SessionStore, StoreUnavailable
from specwire.rpc.errors import RETRY_AFTER, StatusError

logger = logging.getLogger(__name__)

# Seconds between two questions.
LOOK_S = 1.0
# For a question that a request waits for.
ASK_S = 2.0


class LogHealth:
    """Owns the checks; a log that refuses the small write of `SessionStore.ping` takes no session either.

    A log in memory forgets what has expired when it is asked something.

    `trouble`: why the log takes no writes, one sentence for callers; "" where it does, and before the first answer.

    Args:
        changed: is awaited when that begins, and when it is over.
    """

    def __init__(self, store: SessionStore, changed: Callable[[], Awaitable[None]]) -> None:
        self.trouble = ""
        self._store = store
        self._changed = changed
        self._now = asyncio.get_running_loop().time
        self._since = 0.0
        self._told = False
        self._asking: asyncio.Task[None] | None = None

    @property
    def trouble_s(self) -> float:
        """Seconds for which it has taken no writes; 0 while it does."""
        return self._now() - self._since if self.trouble else 0.0

    async def run(self) -> None:
        """Check every second, until cancelled."""
        try:
            while True:
                await self._ask()
                await asyncio.sleep(LOOK_S)
        finally:
            if self._asking is not None:
                self._asking.cancel()
                await asyncio.gather(self._asking, return_exceptions=True)

    async def require(self) -> None:
        """Before a session begins: check once more if the last check failed.

        Raises:
            StatusError: UNAVAILABLE, it still takes none, or does not answer soon.
        """
        if not self.trouble:
            return
        try:
            async with asyncio.timeout(ASK_S):
                await self._ask()
        except TimeoutError:
            pass
        if self.trouble:
            raise StatusError(grpc.StatusCode.UNAVAILABLE, self.trouble, RETRY_AFTER)

    async def _ask(self) -> None:
        """One check at a time, however many wait for it; it goes on if a caller leaves."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._look(), name="log health")
        await asyncio.shield(self._asking)

    async def _look(self) -> None:
        """A failure here is logged, and tried again with the next check."""
        try:
            trouble, detail = await self._answer()
            await self._note(trouble, detail)
        except Exception:  # a failure of our own: what is known stays
            logger.exception("the session log's state could not be asked, or told")

    async def _answer(self) -> tuple[str, str]:
        """What is wrong with the log, for callers and for operators; two empty ones where nothing is."""
        try:
            await self._store.ping()
        except StoreUnavailable as error:
            return str(error), error.detail
        return "", ""

    async def _note(self, trouble: str, detail: str) -> None:
        before, lasted = self.trouble, self.trouble_s
        if trouble and not before:
            self._since = self._now()
        self.trouble = trouble
        said = f"{trouble}{f' ({detail})' if detail else ''}"
        if trouble and not before:
            logger.warning("%s; no session begins", said)
        elif trouble and trouble != before:
            logger.info("%s; still no session begins", said)
        elif before and not trouble:
            logger.warning("the session log takes writes again, after %.1f s", lasted)
        if self._told != bool(trouble):
            await self._changed()
            self._told = bool(trouble)
