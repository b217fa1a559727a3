"""Virtual time: actions run at the times that they were set for, and take no time themselves."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

Action = Callable[[], None]


class Clock:
    """Microseconds. Actions of the same instant run in the order in which they were set."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self._queue: list[tuple[float, int, Action]] = []
        self._numbers = count()
        self._stopped = False

    def after(self, delay_us: float, action: Action) -> None:
        heappush(self._queue, (self.now_us + delay_us, next(self._numbers), action))

    def stop(self) -> None:
        """End `run` after the present action."""
        self._stopped = True

    def run(self) -> None:
        """Run until it is stopped or nothing is left to do."""
        self._stopped = False
        while self._queue and not self._stopped:
            self.now_us, _, action = heappop(self._queue)
            action()


class Machine:
    """A device for one computation at a time; others wait their turn.

    A verifier and a drafter on hardware of their own have one each; on a shared host they share one.
    """

    def __init__(self, clock: Clock) -> None:
        self.busy_us = 0.0
        self._clock = clock
        self._busy = False
        self._waiting: list[tuple[float, Action]] = []

    def use(self, duration_us: float, done: Action) -> None:
        """Compute for `duration_us` as soon as possible, then do `done`."""
        self._waiting.append((duration_us, done))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._waiting)
        if not self._busy:
            return
        duration_us, done = self._waiting.pop(0)
        self.busy_us += duration_us
        self._clock.after(duration_us, lambda: self._finish(done))

    def _finish(self, done: Action) -> None:
        self._next()
        done()
