"""What a drafter counts: plain numbers, written in its thread only, which metrics read from elsewhere."""

from __future__ import annotations

from collections import Counter

from specwire.telemetry.metrics import SIZES, STEPS, Histogram

# How many positions the share of late ones tells of, about: what is older weighs ever less.
REMEMBERED_PASSES = 256


class DrafterTally:
    """Since the drafter began. drafted: tokens drawn; proposed: those that went out in proposals.

    due: decided positions within the run-ahead; late: those of them for which nothing had been proposed.
    misses: the share of late ones of late.
    """

    def __init__(self) -> None:
        self.forward_s = Histogram(STEPS)
        self.rows = Histogram(SIZES)
        self.drafted = 0
        self.proposed = 0
        self.rollbacks = 0
        self.opened = 0
        self.due = 0
        self.late = 0
        self.misses = 0.0
        self.refused: Counter[str] = Counter()

    def step(self, spent_ns: int, rows: int, drawn: int) -> None:
        """A forward has ended."""
        self.forward_s.observe(spent_ns / 1e9)
        self.rows.observe(rows)
        self.drafted += drawn

    def advance(self, due: int, late: int) -> None:
        """A session was told what is decided."""
        self.due += due
        self.late += late
        if due:
            kept = (1 - 1 / REMEMBERED_PASSES) ** due
            self.misses = self.misses * kept + late / due * (1 - kept)
