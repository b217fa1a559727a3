"""Virtual time: actions run at the times that they were set for, and take no time themselves."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

Action = Callable[[], None]


class Drift(NamedTuple):
    """A machine that computes at its own speed for `period_us`, then `factor` times as slowly for as long, in turns."""

    factor: float = 1.0
    period_us: float = 0.0

    def slowness(self, now_us: float) -> float:
        return self.factor if self.period_us and now_us // self.period_us % 2 else 1.0

    def undrifted_us(self, until_us: float) -> float:
        """What all that is computed in so long would have taken at the machine's own speed."""
        if not self.period_us:
            return until_us
        rounds, rest_us = divmod(until_us, 2 * self.period_us)
        slow_us = rounds * self.period_us + max(0.0, rest_us - self.period_us)
        return until_us - slow_us + slow_us / self.factor


STEADY = Drift()


class Clock:
    """Microseconds. Actions of the same instant run in the order in which they were set."""

    def __init__(self, drift: Drift = STEADY) -> None:
        self.now_us = 0.0
        self.drift = drift
        self._queue: list[tuple[float, int, Action]] = []
        self._numbers = count()
        self._stopped = False

    def after(self, delay_us: float, action: Action) -> None:
        heappush(self._queue, (self.now_us + delay_us, next(self._numbers), action))

    def computed_us(self, duration_us: float) -> float:
        """How long what takes so long at the machine's own speed takes, from now on."""
        left_us, now_us, drift = duration_us, self.now_us, self.drift
        while drift.period_us:
            slowness = drift.slowness(now_us)
            change_us = (now_us // drift.period_us + 1) * drift.period_us
            if now_us + left_us * slowness <= change_us:
                break
            left_us -= (change_us - now_us) / slowness
            now_us = change_us
        return now_us + left_us * drift.slowness(now_us) - self.now_us

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
        duration_us = self._clock.computed_us(duration_us)
        self.busy_us += duration_us
        self._clock.after(duration_us, lambda: self._finish(done))

    def _finish(self, done: Action) -> None:
        self._next()
        done()
