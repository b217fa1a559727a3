"""A session's figures, counted from verdicts (forwards, tested) and from what was emitted (outcomes)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from specwire.core.acceptance import DraftCounts, Outcome, late_counts, window_counts
from specwire.core.chain import SourceKind
from specwire.core.effects import Emit
from specwire.core.events import VerdictArrived

MOST_POSITIONS = 32
# Drafters that come and go count anew each time.
MOST_DRAFTERS = 16


@dataclass(slots=True)
class DrafterCounts:
    """One drafter's part: what became of its draft tokens, and how it last drafted.

    lost: it left before the session's end.
    """

    source: int
    model: str
    drafts: DraftCounts = field(default_factory=DraftCounts)
    plan: str = ""
    lost: bool = False


@dataclass(slots=True)
class SessionStats:
    """Instants are the loop's clock in seconds. cached_tokens: of the prompt, those that needed no forward.

    drafts: what became of draft tokens, by who proposed them. forwards_saved: tokens of each forward beyond its first.
    opened: a verifier first had a place for it. opens: places it had at verifiers; reopens: those after the first.
    first_token: the first one that was emitted here; is_first: it is the session's first, too.
    elsewhere: of `outcomes`, what other orchestrators emitted; known at the end. counted: see `orchestrator.totals`.
    """

    started: float
    opened: float | None = None
    first_token: float | None = None
    is_first: bool = False
    last_token: float | None = None
    ended: float | None = None
    target_forwards: int = 0
    cached_tokens: int = 0
    forwards_saved: int = 0
    drafts: dict[SourceKind, DraftCounts] = field(default_factory=lambda: {kind: DraftCounts() for kind in SourceKind})
    drafters: list[DrafterCounts] = field(default_factory=list)
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
    def drafted(self) -> DraftCounts:
        """Whoever proposed them."""
        total = DraftCounts()
        for counts in self.drafts.values():
            total.add(counts)
        return total

    @property
    def shown(self) -> DraftCounts:
        """As it belongs to `outcomes`: of what other orchestrators had decided only what was tested is known."""
        accepted, recovered = self.outcomes[Outcome.ACCEPTED], self.outcomes[Outcome.RECOVERED]
        elsewhere = self.elsewhere[Outcome.ACCEPTED] + self.elsewhere[Outcome.RECOVERED]
        tested = accepted + recovered
        return DraftCounts(max(tested, self.drafted.proposed + elsewhere), tested, accepted)

    @property
    def plan(self) -> str:
        """How drafters that were not lost last drafted; if all were, the latest."""
        there = [drafter for drafter in self.drafters if not drafter.lost] or self.drafters[-1:]
        return "; ".join(drafter.plan for drafter in there if drafter.plan)

    def of_drafter(self, source: int, model: str) -> DrafterCounts:
        """The figures of a drafter that is assigned now."""
        added = DrafterCounts(source, model)
        self.drafters = [*self.drafters, added][-MOST_DRAFTERS:]
        return added

    def count_verdict(self, verdict: VerdictArrived, width: int, source: int = 0, met: int = 0) -> None:
        """width: draft tokens in the window that was decided; if a drafter's, of `source`.

        met: the drafter whose token came during the forward, and met the row behind the window.
        """
        if not verdict.tokens:
            return
        self.target_forwards += 1
        self.forwards_saved += len(verdict.tokens) - 1
        window, late = window_counts(verdict.outcomes, width), late_counts(verdict.outcomes, width)
        self.drafts[verdict.kind].add(window)
        self.drafts[SourceKind.DRAFTER].add(late)
        for drafter in self.drafters:
            if verdict.kind is SourceKind.DRAFTER and drafter.source == source:
                drafter.drafts.add(window)
            if drafter.source == met:
                drafter.drafts.add(late)
        for index in range(min(window.tested, MOST_POSITIONS)):
            self.tested_at[index] += 1
            self.accepted_at[index] += index < window.accepted

    def count_emit(self, emit: Emit, now: float, is_first: bool) -> None:
        """is_first: nobody has emitted anything of the session before."""
        self.outcomes.update(emit.outcomes)
        self.last_token = now
        if self.first_token is None:
            self.first_token, self.is_first = now, is_first

    def count_open(self, now: float) -> None:
        """A verifier has taken it in."""
        self.opens += 1
        if self.opened is None:
            self.opened = now
        else:
            self.reopens += 1

    @property
    def forwards_elsewhere(self) -> int:
        """Forwards that decided what others emitted, from their outcomes: each but the accepted tokens ended one.

        Fewer than there were by those whose last row met a draft token that arrived during the forward.
        """
        return self.elsewhere.total() - self.elsewhere[Outcome.ACCEPTED]

    def count_all(self, outcomes: Sequence[Outcome]) -> None:
        """The session has ended with this output, of which others may have emitted a part."""
        own, self.outcomes = self.outcomes, Counter(outcomes)
        self.elsewhere = self.outcomes - own
