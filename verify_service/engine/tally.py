"""An engine's counters: plain numbers, written in its thread only, read by metrics from other threads."""

from __future__ import annotations

from collections import Counter

from specwire.core.law.acceptance import DraftCounts, late_counts, window_counts
from specwire.core.messages import Outcome, SourceKind, Verdict
from specwire.core.verify.chains import Offer
from specwire.telemetry.metrics import SIZES, STEPS, Histogram
from verify_service.engine.messages import StepTimings

MOST_POSITIONS = 32


class EngineTally:
    """Counts since the engine began. `drafts`: draft tokens, by source kind.

    `refused`: windows of which a token was refused, each a rollback and a dead chain.
    """

    def __init__(self) -> None:
        self.forward_s = Histogram(STEPS)
        self.choose_s = Histogram(STEPS)
        self.rows = Histogram(SIZES)
        self.sessions = Histogram(SIZES)
        self.gap_us = 0
        self.waited_us = 0
        self.drafted_us = 0
        self.outcomes: Counter[Outcome] = Counter()
        self.offers: Counter[Offer] = Counter()
        self.windows = 0
        self.refused = 0
        self.drafts = {kind: DraftCounts() for kind in SourceKind}
        self.accepted_at = [0] * MOST_POSITIONS

    def step(self, timings: StepTimings) -> None:
        """A forward has ended."""
        self.forward_s.observe(timings.forward_us / 1e6)
        self.choose_s.observe(timings.choose_us / 1e6)
        self.rows.observe(timings.rows)
        self.sessions.observe(timings.sessions)
        self.gap_us += timings.gap_us
        self.waited_us += timings.waited_us
        self.drafted_us += timings.drafted_us

    def verdict(self, verdict: Verdict) -> None:
        """A session's part of a step was decided."""
        for outcome in verdict.outcomes:
            self.outcomes[outcome] += 1
        self.drafts[SourceKind.DRAFTER].add(late_counts(verdict.outcomes, verdict.width))
        if not verdict.width:
            return
        window = window_counts(verdict.outcomes, verdict.width)
        self.windows += 1
        self.drafts[verdict.kind].add(window)
        self.refused += Outcome.RECOVERED in verdict.outcomes
        for index in range(min(window.accepted, MOST_POSITIONS)):
            self.accepted_at[index] += 1
