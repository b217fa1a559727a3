"""What an orchestrator counts beside its sessions' own figures (`orchestrator.stats`)."""

from __future__ import annotations

from collections import Counter

from orchestrator.stats import SessionStats
from specwire.telemetry.metrics import GAPS, LATENCIES, Histogram


class OrchestratorTally:
    """Since the start.

    claims: sessions taken from others, or gone on with. fenced: sessions that others took.
    append_failures: what the log refused, or did not take in time. refused: sessions that were not begun, by status.
    """

    def __init__(self) -> None:
        self.first_token_s = Histogram(LATENCIES)
        self.queue_s = Histogram(LATENCIES)
        self.whole_s = Histogram(LATENCIES)
        self.between_s = Histogram(GAPS)
        self.append_s = Histogram(GAPS)
        self.append_failures = 0
        self.begun = 0
        self.prompt_tokens = 0
        self.claims = 0
        self.fenced = 0
        self.refused: Counter[str] = Counter()

    def emitted(self, stats: SessionStats, tokens: int, now: float, first: bool) -> None:
        """Tokens of a session were emitted; before `stats` count them. first: there are no others yet."""
        if not tokens:
            return
        if first:
            self.first_token_s.observe(now - stats.started)
            if stats.opened is not None:
                self.queue_s.observe(stats.opened - stats.started)
        elif stats.last_token is not None:
            self.between_s.observe((now - stats.last_token) / tokens, tokens)

    def ended(self, stats: SessionStats) -> None:
        if stats.ended is not None:
            self.whole_s.observe(stats.ended - stats.started)
