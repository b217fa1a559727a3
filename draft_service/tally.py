"""What a drafter counts: plain numbers, written in its thread only, which metrics read from elsewhere."""

from __future__ import annotations

from collections import Counter

from specwire.telemetry.metrics import SIZES, STEPS, Histogram


class Tally:
    """Since the drafter began. drafted: tokens drawn; proposed: those that went out in proposals."""

    def __init__(self) -> None:
        self.forward_s = Histogram(STEPS)
        self.rows = Histogram(SIZES)
        self.drafted = 0
        self.proposed = 0
        self.rollbacks = 0
        self.opened = 0
        self.refused: Counter[str] = Counter()

    def step(self, spent_ns: int, rows: int, drawn: int) -> None:
        """A forward has ended."""
        self.forward_s.observe(spent_ns / 1e9)
        self.rows.observe(rows)
        self.drafted += drawn
