"""Sessions that were opened while all slots were in use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from specwire.core.admission import Waiting, next_in_turn
from verify_service.roster import Held


@dataclass(frozen=True, slots=True)
class Patience:
    """sessions: how many may wait for a slot; 0: none. wait_us: for how long."""

    sessions: int = 0
    wait_us: float = 30e6


class WaitingRoom:
    """Invariant: holds exactly the roster's sessions that have no slot."""

    def __init__(self) -> None:
        self._arrivals = count()
        self._held: dict[Waiting, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, held: Held) -> None:
        self._held[Waiting(held.scope, held.priority, next(self._arrivals))] = held

    def remove(self, held: Held) -> None:
        self._held = {turn: each for turn, each in self._held.items() if each is not held}

    def next(self, seated: Iterable[Held]) -> Held | None:
        """Whose turn it is, given those that have slots."""
        turn = next_in_turn(self._held, Counter(each.scope for each in seated)) if self._held else None
        return None if turn is None else self._held[turn]
