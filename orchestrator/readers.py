"""Who reads a session: it goes on for as long as somebody does, and for a grace after that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from orchestrator.timers import Timers

# Seconds. A session that nobody has begun to read was left by its caller before it was there.
UNREAD = 5.0


class Readers:
    """grace: seconds for which a session without a reader goes on. goes_on: whether it has not ended anyway.

    on_left: nobody came back in time.
    """

    def __init__(self, timers: Timers, grace: float, goes_on: Callable[[], bool], on_left: Callable[[], None]) -> None:
        self.count = 0
        self._timers = timers
        self._grace = grace
        self._goes_on = goes_on
        self._on_left = on_left

    def expect(self) -> None:
        """Whoever asked for the session may be gone already."""
        self._wait(max(UNREAD, self._grace))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A reader is here for as long."""
        self.count += 1
        self._timers.cancel("detached")
        try:
            yield
        finally:
            self.count -= 1
            if self.count == 0 and self._goes_on():
                self._wait(self._grace)

    def _wait(self, seconds: float) -> None:
        self._timers.set("detached", seconds, self._on_left)
