"""How long to wait before the next attempt."""

from __future__ import annotations

import random


class Backoff:
    """Waits that double from `first` to `most` seconds, each scattered over its upper half.

    Scattered, so that many who lost the same peer at one moment do not all come back at one moment.
    """

    def __init__(self, first: float, most: float) -> None:
        self._first = self._next = first
        self._most = most
        self._random = random.Random()

    def next(self) -> float:
        """Seconds to wait now."""
        wait, self._next = self._next, min(self._most, 2 * self._next)
        return wait * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """What was tried has worked."""
        self._next = self._first
