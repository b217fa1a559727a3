"""How many replicas a pool should have, as a pure function of its load, with hysteresis.

More at once where somebody waits or replicas are nearly full for a while; fewer, one at a time, where for a much longer
while those that stay would be far from full. Between the two nothing moves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Rule:
    """least, most: replicas. high, low: shares of the slots; times are seconds.

    Invariant: low < high, so that a pool which has just shrunk is not at once to grow.
    """

    least: int
    most: int
    high: float = 0.85
    low: float = 0.5
    grow_after_s: float = 10.0
    shrink_after_s: float = 300.0

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or self.most < 1:
            raise ValueError(f"replicas: must be 0 <= min <= max and max >= 1, not {self.least} and {self.most}")
        if not 0 < self.low < self.high <= 1:
            raise ValueError(f"occupancy: must be 0 < low < high <= 1, not {self.low} and {self.high}")


@dataclass(frozen=True, slots=True)
class Reading:
    """A pool's load: sessions that have a slot, that wait for one, and slots, of all replicas together."""

    replicas: int
    running: int
    waiting: int
    slots: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Since when it is too full, and since when too empty; None while it is not."""

    full_since: float | None = None
    empty_since: float | None = None


def decide(rule: Rule, memory: Memory, reading: Reading, now: float) -> tuple[int, Memory]:
    """The replicas that there should be now, and what to remember. now: seconds on any clock that does not go back."""
    count = reading.replicas
    if not rule.least <= count <= rule.most:
        return min(max(count, rule.least), rule.most), Memory()
    if reading.slots == 0:  # nobody has said yet what a replica can hold
        return count, memory
    demand, each = reading.running + reading.waiting, reading.slots / count
    memory = Memory(
        _since(memory.full_since, reading.waiting > 0 or demand > rule.high * reading.slots, now),
        _since(memory.empty_since, count > rule.least and demand <= rule.low * each * (count - 1), now),
    )
    if _lasts(memory.full_since, rule.grow_after_s, now) and count < rule.most:
        needed = max(count + 1, math.ceil(demand / (rule.high * each)))
        return min(needed, rule.most), Memory()
    if _lasts(memory.empty_since, rule.shrink_after_s, now):
        return count - 1, replace(memory, empty_since=now)
    return count, memory


def _since(began: float | None, holds: bool, now: float) -> float | None:
    return (now if began is None else began) if holds else None


def _lasts(began: float | None, seconds: float, now: float) -> bool:
    return began is not None and now - began >= seconds
