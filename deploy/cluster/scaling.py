"""How many replicas a pool should have, as a pure function of its load, with hysteresis.

It grows at once where for a while sessions wait, replicas are nearly full, or drafters do not keep up. It shrinks, one
at a time, where for much longer the remaining replicas would be far from that. Between the two nothing changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """least, most: replicas. high, low: shares of the slots; times are seconds.

    queue_s: a session may wait as long for a slot before the pool counts as full.
    misses: so may be the share of positions that drafters are late for.

    Invariant: low < high, so that a pool which has just shrunk is not at once to grow.
    """

    least: int
    most: int
    high: float = 0.85
    low: float = 0.5
    grow_after_s: float = 10.0
    shrink_after_s: float = 300.0
    queue_s: float = 1.0
    misses: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or self.most < 1:
            raise ValueError(f"replicas: must be 0 <= min <= max and max >= 1, not {self.least} and {self.most}")
        if not 0 < self.low < self.high <= 1:
            raise ValueError(f"occupancy: must be 0 < low < high <= 1, not {self.low} and {self.high}")
        if not min(self.grow_after_s, self.shrink_after_s, self.queue_s) >= 0:
            raise ValueError(
                f"times: must not be negative, not {self.grow_after_s}, {self.shrink_after_s}, {self.queue_s}"
            )
        if not 0 <= self.misses <= 1:
            raise ValueError(f"misses: must be from 0 to 1, not {self.misses}")


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """A pool's load: sessions that have a slot, that wait for one, and slots, of all replicas together.

    ready: of its `replicas`, those that have told their load; None for all. waiting: also those that no verifier has.
    queue_s: the longest that a session waits, or has waited of late. misses: as in a rule, over all its sessions.
    """

    replicas: int
    running: int
    waiting: int
    slots: int
    queue_s: float = 0.0
    misses: float = 0.0
    ready: int | None = None

    @property
    def known(self) -> int:
        """Replicas whose load this is."""
        return self.replicas if self.ready is None else self.ready


@dataclass(frozen=True, slots=True)
class ScalingState:
    """Since when it is too full, and since when too empty; None while it is not."""

    full_since: float | None = None
    empty_since: float | None = None


def decide(rule: ScalingRule, memory: ScalingState, reading: PoolLoad, now: float) -> tuple[int, ScalingState]:
    """The replicas that there should be now, and what to remember. now: seconds on any clock that does not go back.

    A pool grows only once all that it has are ready and have been seen at work: what is being started is not asked for
    twice.
    """
    count = reading.replicas
    if not rule.least <= count <= rule.most:
        return min(max(count, rule.least), rule.most), ScalingState()
    if count == 0:
        return min(1, reading.waiting), ScalingState()
    if reading.slots == 0:  # no replica has told its slots yet
        return count, memory
    memory = ScalingState(
        _since(memory.full_since, reading.known == count and _is_full(rule, reading, count), now),
        _since(memory.empty_since, count > rule.least and _would_do(rule, reading, count - 1), now),
    )
    if _lasts(memory.full_since, rule.grow_after_s, now) and count < rule.most:
        needed = math.ceil((reading.running + reading.waiting) * count / (rule.high * reading.slots))
        return min(max(count + 1, needed), rule.most), ScalingState()
    if _lasts(memory.empty_since, rule.shrink_after_s, now):
        return count - 1, replace(memory, empty_since=now)
    return count, memory


def _is_full(rule: ScalingRule, reading: PoolLoad, count: int) -> bool:
    """Whether `count` replicas are too full."""
    demand = reading.running + reading.waiting
    return demand > rule.high * _slots(reading, count) or reading.queue_s > rule.queue_s or _late(rule, reading, count)


def _would_do(rule: ScalingRule, reading: PoolLoad, count: int) -> bool:
    """Whether `count` replicas would do, far from full."""
    idle = reading.waiting == 0 and reading.queue_s <= rule.queue_s
    return idle and reading.running <= rule.low * _slots(reading, count) and not _late(rule, reading, count)


def _late(rule: ScalingRule, reading: PoolLoad, count: int) -> bool:
    """Drafters do not keep up, and more of them would have fewer sessions each."""
    return reading.misses > rule.misses and reading.running > count


def _slots(reading: PoolLoad, count: int) -> float:
    return reading.slots * count / max(1, reading.known)


def _since(began: float | None, holds: bool, now: float) -> float | None:
    return (now if began is None else began) if holds else None


def _lasts(began: float | None, seconds: float, now: float) -> bool:
    return began is not None and now - began >= seconds
