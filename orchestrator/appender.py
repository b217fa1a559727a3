"""Writes one session's appends into the log, again and again while the log does not answer."""

from __future__ import annotations

import asyncio

from orchestrator.store import SessionStore, StoreUnavailable
from specwire.core.effects import Append

RETRY_S = 0.1


class Appender:
    """An append whose outcome is unknown is repeated: an equal append changes nothing.

    Args:
        fence: of the session's present owner.
        timeout: seconds after which a log that does not answer is given up.
    """

    def __init__(self, store: SessionStore, session_id: str, fence: int, timeout: float) -> None:
        self._store = store
        self._session_id = session_id
        self._fence = fence
        self._timeout = timeout

    async def write(self, effect: Append) -> bool:
        """Returns, once the log has acknowledged it, whether somebody asked there for the session's end.

        Raises:
            StoreError: the log refused, or did not answer in time.
        """
        give_up = asyncio.get_running_loop().time() + self._timeout
        while True:
            try:
                return await self._write_once(effect)
            except StoreUnavailable:
                if asyncio.get_running_loop().time() > give_up:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _write_once(self, effect: Append) -> bool:
        place = (self._session_id, self._fence, effect.position, effect.tokens, effect.outcomes)
        if effect.end is None:
            return (await self._store.append(*place)).cancelled
        await self._store.finish(*place, effect.end.reason, effect.end.text_length)
        return False
