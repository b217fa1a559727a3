"""What all of an orchestrator's sessions have done together, for metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from orchestrator.stats import SessionStats
from specwire.core.limits import FinishReason


class Totals:
    """stats: the sums of ended sessions' figures; its instants mean nothing. reasons: why they ended."""

    def __init__(self) -> None:
        self.stats = SessionStats(0.0)
        self.reasons: Counter[FinishReason] = Counter()

    def count(self, stats: SessionStats, reason: FinishReason) -> None:
        """A session has ended here."""
        self.reasons[reason] += 1
        self.keep(stats)

    def keep(self, stats: SessionStats) -> None:
        """A session is not known here any more, ended or not. Idempotent: no count may ever fall."""
        if not stats.counted:
            stats.counted = True
            add(self.stats, stats)

    def with_running(self, running: Iterable[SessionStats]) -> Totals:
        """These, and what sessions that have not ended have done so far."""
        totals = Totals()
        totals.reasons = self.reasons
        for stats in (self.stats, *running):
            add(totals.stats, stats)
        return totals


def add(total: SessionStats, more: SessionStats) -> None:
    total.target_forwards += more.target_forwards
    total.forwards_saved += more.forwards_saved
    for kind, counts in more.drafts.items():
        total.drafts[kind].add(counts)
    total.cached_tokens += more.cached_tokens
    total.opens += more.opens
    total.reopens += more.reopens
    total.verifier_losses += more.verifier_losses
    total.drafter_losses += more.drafter_losses
    total.drafter_refusals += more.drafter_refusals
    total.outcomes = total.outcomes + (more.outcomes - more.elsewhere)
    total.tested_at = [a + b for a, b in zip(total.tested_at, more.tested_at, strict=True)]
    total.accepted_at = [a + b for a, b in zip(total.accepted_at, more.accepted_at, strict=True)]
