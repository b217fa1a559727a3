"""One owner's timers and tasks, which end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine


class Timers:
    """Named: setting one again replaces it."""

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


class Tasks:
    """on_failure: is called with the error of a task that failed."""

    def __init__(self, on_failure: Callable[[Exception], None]) -> None:
        self._on_failure = on_failure
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._on_failure(error)

    async def cancel_all(self) -> None:
        """Returns when they have ended."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
