"""Sessions that were opened while all slots were in use."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from specwire.core.admission import Waiting, next_in_turn
from verify_service.roster import Held

# Tenants whose latest turn is remembered.
REMEMBERED_TENANTS = 1024


@dataclass(frozen=True, slots=True)
class QueuePatience:
    """sessions: how many may wait for a slot; 0: none. wait_us: for how long."""

    sessions: int = 0
    wait_us: float = 30e6


# The longest wait is remembered for this long, and at most for twice as long.
WAITS_KEPT_US = 2.5e6


class LongestWait:
    """Of late: in the present stretch of time and the one before. Written by one thread, read by any."""

    def __init__(self) -> None:
        self._stretch = 0
        self._longest_us = (0.0, 0.0)

    def note(self, waited_us: float, now_us: float) -> None:
        """A wait is over."""
        stretch = int(now_us // WAITS_KEPT_US)
        before, present = self._as_of(stretch)
        self._stretch, self._longest_us = stretch, (before, max(present, waited_us))

    def at(self, now_us: float) -> float:
        return max(self._as_of(int(now_us // WAITS_KEPT_US)))

    def _as_of(self, stretch: int) -> tuple[float, float]:
        """Of the stretch before that one, and of that one."""
        passed = stretch - self._stretch
        before, present = self._longest_us
        return (before, present) if passed <= 0 else (present, 0.0) if passed == 1 else (0.0, 0.0)


class WaitingRoom:
    """Invariant: holds the sessions without a slot, except parked ones: those ask for none until they have room."""

    def __init__(self) -> None:
        self._numbers = count()
        self._held: dict[Waiting, Held] = {}
        self._latest: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, held: Held) -> None:
        self._held[Waiting(held.scope, held.priority, next(self._numbers))] = held

    def remove(self, held: Held) -> None:
        self._held = {turn: each for turn, each in self._held.items() if each is not held}

    def next(self, served: Iterable[Held]) -> Held | None:
        """Whose turn it is, given those that are served now."""
        if not self._held:
            return None
        turn = next_in_turn(self._held, Counter(each.scope for each in served), self._latest)
        return None if turn is None else self._held[turn]

    def took_turn(self, held: Held) -> None:
        """It has a slot now."""
        self.remove(held)
        self._latest[held.scope] = next(self._numbers)
        self._latest.move_to_end(held.scope)
        if len(self._latest) > REMEMBERED_TENANTS:
            self._latest.popitem(last=False)
