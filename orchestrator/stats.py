"""A session's figures, counted from verdicts (forwards, tested) and from what was emitted (outcomes)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from specwire.core.acceptance import Outcome
from specwire.core.chain import SourceKind
from specwire.core.effects import Emit
from specwire.core.events import VerdictArrived

MOST_POSITIONS = 32
# Drafters that come and go count anew each time.
MOST_DRAFTERS = 16


@dataclass(slots=True)
class DrafterStats:
    """One drafter's part: its draft tokens in tested windows, the accepted ones of them, and how it last drafted.

    lost: it left before the session's end.
    """

    source: int
    model: str
    proposed: int = 0
    accepted: int = 0
    plan: str = ""
    lost: bool = False


@dataclass(slots=True)
class SessionStats:
    """Instants are the loop's clock in seconds. cached_tokens: of the prompt, those that needed no forward.

    opened: a verifier first had a place for it. opens: places it had at verifiers; reopens: those after the first.
    elsewhere: of `outcomes`, what other orchestrators emitted; known at the end. counted: see `orchestrator.totals`.
    """

    started: float
    opened: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    target_forwards: int = 0
    cached_tokens: int = 0
    proposed: int = 0
    proposed_ngram: int = 0
    accepted_ngram: int = 0
    proposed_prediction: int = 0
    accepted_prediction: int = 0
    drafters: list[DrafterStats] = field(default_factory=list)
    accepted: int = 0
    opens: int = 0
    reopens: int = 0
    verifier_losses: int = 0
    drafter_losses: int = 0
    drafter_refusals: int = 0
    counted: bool = False
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    elsewhere: Counter[Outcome] = field(default_factory=Counter)
    tested_at: list[int] = field(default_factory=lambda: [0] * MOST_POSITIONS)
    accepted_at: list[int] = field(default_factory=lambda: [0] * MOST_POSITIONS)

    @property
    def plan(self) -> str:
        """How drafters that were not lost last drafted; if all were, the latest."""
        there = [drafter for drafter in self.drafters if not drafter.lost] or self.drafters[-1:]
        return "; ".join(drafter.plan for drafter in there if drafter.plan)

    def of_drafter(self, source: int, model: str) -> DrafterStats:
        """The figures of a drafter that is assigned now."""
        added = DrafterStats(source, model)
        self.drafters = [*self.drafters, added][-MOST_DRAFTERS:]
        return added

    def count_verdict(self, verdict: VerdictArrived, tested: int) -> None:
        """tested: tokens of the window that was decided, whoever proposed them."""
        if not verdict.tokens:
            return
        self.target_forwards += 1
        self.proposed += tested + _met_late(verdict, tested)
        self.accepted += verdict.outcomes.count(Outcome.ACCEPTED)
        accepted = min(tested, verdict.outcomes.count(Outcome.ACCEPTED))
        if verdict.kind is SourceKind.NGRAM:
            self.proposed_ngram += tested
            self.accepted_ngram += accepted
        elif verdict.kind is SourceKind.PREDICTION:
            self.proposed_prediction += tested
            self.accepted_prediction += accepted
        for index in range(min(tested, accepted + 1, MOST_POSITIONS)):
            self.tested_at[index] += 1
            self.accepted_at[index] += index < accepted

    def count_emit(self, emit: Emit, now: float) -> None:
        self.outcomes.update(emit.outcomes)
        self.last_token = now
        if self.first_token is None:
            self.first_token = now

    def count_open(self, now: float) -> None:
        """A verifier has taken it in."""
        self.opens += 1
        if self.opened is None:
            self.opened = now
        else:
            self.reopens += 1

    def count_all(self, outcomes: Sequence[Outcome]) -> None:
        """The session has ended with this output, of which others may have emitted a part."""
        own, self.outcomes = self.outcomes, Counter(outcomes)
        self.elsewhere = self.outcomes - own


def _met_late(verdict: VerdictArrived, tested: int) -> int:
    """1 if the last row met a draft token that arrived during the forward: it was tested too, outside the window."""
    whole = len(verdict.tokens) == tested + 1
    return int(whole and verdict.outcomes[-1] in (Outcome.ACCEPTED, Outcome.RECOVERED))
