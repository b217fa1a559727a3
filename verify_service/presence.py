"""Which sessions the links have open here: what a verifier that stops waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress


class Presence:
    """Counts by link and handle; in the event loop."""

    def __init__(self) -> None:
        self._open: set[tuple[int, int]] = set()
        self._none = asyncio.Event()
        self._none.set()

    def came(self, link: int, handles: Iterable[int]) -> None:
        self._open.update((link, handle) for handle in handles)
        self._note()

    def went(self, link: int, handles: Iterable[int]) -> None:
        """Handles that are not open may be among them."""
        self._open.difference_update((link, handle) for handle in handles)
        self._note()

    def lost(self, link: int) -> None:
        """All of a link's."""
        self._open = {each for each in self._open if each[0] != link}
        self._note()

    def _note(self) -> None:
        if self._open:
            self._none.clear()
        else:
            self._none.set()

    async def none_left(self, seconds: float) -> None:
        """Until there are none, at most for so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._none.wait()
