"""Virtual time: actions run at the times that they were set for, and take no time themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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

    A verifier and a drafter on hardware of their own have one each; on a shared host they contend for one.
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


class Host(Machine):
    """A device for several computations at once: while there are two or more, each takes `stretch` times as long.

    So a verifier and a drafter on a few cores slow each other down: 1 is not at all, 2 is as on one core.
    """

    def __init__(self, clock: Clock, stretch: float) -> None:
        super().__init__(clock)
        self._stretch = stretch
        self._jobs: list[_Job] = []
        self._since_us = 0.0
        self._turn = 0

    def use(self, duration_us: float, done: Action) -> None:
        self._pass()
        self._jobs.append(_Job(duration_us, done))
        self.busy_us += duration_us
        self._set()

    def _pass(self) -> None:
        """Take off what was computed since the last change."""
        passed_us = (self._clock.now_us - self._since_us) / self._slowness
        for job in self._jobs:
            job.left_us -= passed_us
        self._since_us = self._clock.now_us

    @property
    def _slowness(self) -> float:
        return self._stretch if len(self._jobs) > 1 else 1.0

    def _set(self) -> None:
        """Wake when the shortest job is done, unless another one comes before."""
        self._turn += 1
        if self._jobs:
            first = min(self._jobs, key=lambda job: job.left_us)
            self._clock.after(max(0.0, first.left_us) * self._slowness, partial(self._ended, first, self._turn))

    def _ended(self, job: _Job, turn: int) -> None:
        if turn == self._turn:
            self._pass()
            self._jobs.remove(job)
            self._set()
            job.done()


@dataclass(slots=True, eq=False)
class _Job:
    left_us: float
    done: Action
