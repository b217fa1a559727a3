"""Named timers of one owner: setting one again replaces it, and all end with their owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Timers:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._running: dict[str, asyncio.TimerHandle] = {}

    def set(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        self.cancel(name)
        self._running[name] = self._loop.call_later(seconds, self._fire, name, action)

    def left(self, name: str) -> float | None:
        """Seconds until the timer fires; None if there is none of that name."""
        timer = self._running.get(name)
        return None if timer is None else timer.when() - self._loop.time()

    def _fire(self, name: str, action: Callable[[], None]) -> None:
        del self._running[name]
        action()

    def cancel(self, name: str) -> None:
        timer = self._running.pop(name, None)
        if timer is not None:
            timer.cancel()

    def cancel_all(self) -> None:
        for name in list(self._running):
            self.cancel(name)
