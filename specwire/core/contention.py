"""How much longer a verifier's forwards take while a drafter on its host computes. Pure; it is told times in us.

Two processes on two cores get in each other's way; on sixty they may not. V(m) of a quiet machine is measured at start,
but how the two get along shows only when both run: forwards during which the drafter was at work are held against those
during which it was not. Times are instants on one clock, of when messages arrived: both take about as long to come.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from specwire.core.speed import ForwardTimes, smoothed

CONTENTION_DECAY = 0.1
# Forwards of each kind before anything is said, and forwards of the other kind after which it was another time.
LEAST_FORWARDS = 8
STALE_AFTER = 2048
# The share of a forward during which the drafter computed: from here on together, up to there apart, else neither.
TOGETHER_SHARE, APART_SHARE = 0.5, 0.1
# Wider forwards are not of one session's window.
MOST_ROWS = 32
REMEMBERED_FORWARDS = 64


class Forward(NamedTuple):
    """A forward of one session alone, of `rows` positions."""

    rows: int
    ended_us: float
    took_us: float

    @property
    def began_us(self) -> float:
        return self.ended_us - self.took_us


@dataclass(slots=True)
class _Stretch:
    """Forwards of one kind: their time as a multiple of V(m) on a quiet machine. age: settled ones since the last."""

    mean: float | None = None
    seen: int = 0
    age: int = 0

    def add(self, ratio: float) -> None:
        self.mean = smoothed(self.mean, ratio, CONTENTION_DECAY)
        self.seen += 1
        self.age = 0

    @property
    def known(self) -> float | None:
        return self.mean if self.seen >= LEAST_FORWARDS and self.age < STALE_AFTER else None


class Contention:
    """One verifier and one drafter on its host.

    A forward is settled once it is known what the drafter did meanwhile: when something comes that it drafted later.

    Args:
        quiet: V(m) with nothing else running; copied.
    """

    def __init__(self, quiet: ForwardTimes) -> None:
        self._quiet = ForwardTimes(quiet.points)
        self._together, self._apart = _Stretch(), _Stretch()
        self._drafts: deque[tuple[float, float]] = deque(maxlen=REMEMBERED_FORWARDS)
        self._pending: deque[Forward] = deque(maxlen=REMEMBERED_FORWARDS)

    def drafted(self, arrived_us: float, draft_us: float) -> None:
        """A chunk arrived that took `draft_us` to draft."""
        began_us = arrived_us - draft_us
        self._drafts.append((began_us, arrived_us))
        while self._pending and self._pending[0].ended_us <= began_us:
            self._settle(self._pending.popleft())

    def forward(self, forward: Forward) -> None:
        """A forward has ended."""
        if forward.took_us > 0 and forward.rows <= MOST_ROWS:
            self._pending.append(forward)

    def _settle(self, forward: Forward) -> None:
        overlaps = (min(end, forward.ended_us) - max(start, forward.began_us) for start, end in self._drafts)
        share = sum(max(0.0, overlap) for overlap in overlaps) / forward.took_us
        self._together.age += 1
        self._apart.age += 1
        ratio = forward.took_us / self._quiet.at(forward.rows)
        if share >= TOGETHER_SHARE:
            self._together.add(ratio)
        elif share <= APART_SHARE:
            self._apart.add(ratio)

    @property
    def slowdown(self) -> float | None:
        """V(m) while the drafter is at work / V(m) while it is not, at least 1; None until both were seen lately."""
        together, apart = self._together.known, self._apart.known
        return None if together is None or apart is None else max(1.0, together / apart)

    def apart(self) -> ForwardTimes | None:
        """V(m) as it is lately while the drafter does nothing."""
        return self._stretched(self._apart.known)

    def together(self) -> ForwardTimes | None:
        """V(m) as it is lately while the drafter is at work."""
        return self._stretched(self._together.known)

    def _stretched(self, by: float | None) -> ForwardTimes | None:
        return None if by is None else ForwardTimes({rows: by * us for rows, us in self._quiet.points.items()})
