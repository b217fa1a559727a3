"""What is counted while tokens are decided: plain numbers, an addition each, that are read when somebody asks.

The verifier's are in its engine, which counts its own steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate

from specwire.core.messages import Discipline, Emit, Outcome, SourceKind, Verdict

# Seconds. Buckets of what clients wait for, of a step and its parts, and of a write into the log.
LATENCIES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
GAPS = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
STEPS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Histogram:
    """Counts by bucket. Written by one thread; others may read it at any time, and then miss at most the last addition.

    bounds: ascending; a value counts in the first bucket that is not below it.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        bounds = (*(f"{bound:g}" for bound in self.bounds), "+Inf")
        return list(zip(bounds, accumulate(list(self.counts)), strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# What became of draft tokens: verifier and orchestrator count the same verdicts, each for its own figures.

# Positions of a window at which acceptance is counted.
MOST_POSITIONS = 32


@dataclass(slots=True)
class DraftCounts:
    """Draft tokens of one source, or of all.

    proposed: put to the target, in a window or, where they came during the forward, at its last row.
    tested: of these, the ones that were judged: all before them in the window had been accepted.
    accepted: of these, the ones that passed. accepted / tested is the acceptance.

    Invariant: accepted <= tested <= proposed.
    """

    proposed: int = 0
    tested: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= self.tested <= self.proposed:
            raise ValueError(f"{self}: more accepted than tested, or more tested than proposed")

    def add(self, more: DraftCounts) -> None:
        self.proposed += more.proposed
        self.tested += more.tested
        self.accepted += more.accepted


def window_counts(outcomes: Sequence[Outcome], width: int) -> DraftCounts:
    """Draft tokens tested and accepted in a step's window. Tokens behind the text's end were not tested."""
    return _judged(outcomes[:width], width)


def late_counts(outcomes: Sequence[Outcome], width: int) -> DraftCounts:
    """Likewise for a draft token that came too late for the window and stands at its last row, behind it."""
    return _judged(outcomes[width : width + 1])


def _judged(outcomes: Sequence[Outcome], proposed: int | None = None) -> DraftCounts:
    """proposed: None for as many as were tested."""
    accepted = outcomes.count(Outcome.ACCEPTED)
    tested = accepted + outcomes.count(Outcome.RECOVERED)
    return DraftCounts(tested if proposed is None else proposed, tested, accepted)


@dataclass(slots=True)
class SpeculationCounts:
    """drafts: by who proposed them. tested_at, accepted_at: those of windows, by position there."""

    _: KW_ONLY
    drafts: dict[SourceKind, DraftCounts] = field(default_factory=lambda: {kind: DraftCounts() for kind in SourceKind})
    tested_at: list[int] = field(default_factory=lambda: [0] * MOST_POSITIONS)
    accepted_at: list[int] = field(default_factory=lambda: [0] * MOST_POSITIONS)

    def count_drafts(self, verdict: Verdict) -> tuple[DraftCounts, DraftCounts]:
        """Returns those of its window, and the one that came too late for that."""
        window, late = window_counts(verdict.outcomes, verdict.width), late_counts(verdict.outcomes, verdict.width)
        self.drafts[verdict.kind].add(window)
        self.drafts[SourceKind.DRAFTER].add(late)
        for index in range(min(window.tested, MOST_POSITIONS)):
            self.tested_at[index] += 1
            self.accepted_at[index] += index < window.accepted
        return window, late

    @property
    def drafted(self) -> DraftCounts:
        """Draft tokens of all sources together."""
        total = DraftCounts()
        for counts in self.drafts.values():
            total.add(counts)
        return total


# ----------------------------------------------------------------------------------------------------------------------
# A session's figures, counted from verdicts (forwards, tested) and from what was emitted (outcomes).

# A drafter that comes back counts as a new one.
MOST_DRAFTERS = 16


@dataclass(slots=True)
class DrafterCounts:
    """One drafter's figures: what became of its draft tokens, and its last plan.

    planned: by the verifier. lost: it left before the session's end.
    """

    source: int
    model: str
    drafts: DraftCounts = field(default_factory=DraftCounts)
    planned: str = ""
    lost: bool = False

    @property
    def plan(self) -> str:
        """As people are told of it: the plan alone does not say whether anything comes of it."""
        silent = self.planned and not self.drafts.proposed and not self.planned.startswith(Discipline.OFF)
        return f"{self.planned}, nothing proposed yet" if silent else self.planned


@dataclass(slots=True)
class SessionStats(SpeculationCounts):
    """Instants are the loop's clock in seconds. cached_tokens: of the prompt, those that needed no forward.

    forwards_saved: tokens of each forward beyond its first.
    opened: when a verifier first gave it a slot. opens: how often verifiers did; reopens: without the first.
    first_token: when the first one was emitted here; is_first: it was the session's first, too.
    elsewhere: the part of `outcomes` that other orchestrators emitted; known at the end. counted: its part of the
    orchestrator's sums (`Totals`).
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
    drafters: list[DrafterCounts] = field(default_factory=list)
    opens: int = 0
    reopens: int = 0
    verifier_losses: int = 0
    drafter_losses: int = 0
    drafter_refusals: int = 0
    counted: bool = False
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    elsewhere: Counter[Outcome] = field(default_factory=Counter)

    @property
    def in_windows(self) -> DraftCounts:
        """Of `drafted`, without those that came during a forward: as other servers count, which know none."""
        whole, tested = self.drafted, sum(self.tested_at)
        return DraftCounts(whole.proposed - whole.tested + tested, tested, sum(self.accepted_at))

    @property
    def shown(self) -> DraftCounts:
        """Consistent with `outcomes`: of tokens that other orchestrators had decided, only what was tested is known."""
        accepted, recovered = self.outcomes[Outcome.ACCEPTED], self.outcomes[Outcome.RECOVERED]
        elsewhere = self.elsewhere[Outcome.ACCEPTED] + self.elsewhere[Outcome.RECOVERED]
        tested = accepted + recovered
        return DraftCounts(max(tested, self.drafted.proposed + elsewhere), tested, accepted)

    @property
    def plan(self) -> str:
        """The last plans of the drafters that were not lost; if all were, of the latest one."""
        there = [drafter for drafter in self.drafters if not drafter.lost] or self.drafters[-1:]
        return "; ".join(drafter.plan for drafter in there if drafter.plan)

    def of_drafter(self, source: int, model: str) -> DrafterCounts:
        """Begin the figures of a newly assigned drafter."""
        added = DrafterCounts(source, model)
        self.drafters = [*self.drafters, added][-MOST_DRAFTERS:]
        return added

    def count_verdict(self, verdict: Verdict) -> None:
        if not verdict.tokens:
            return
        self.target_forwards += 1
        self.forwards_saved += len(verdict.tokens) - 1
        window, late = self.count_drafts(verdict)
        for drafter in self.drafters:
            if verdict.kind is SourceKind.DRAFTER and drafter.source == verdict.source:
                drafter.drafts.add(window)
            if drafter.source == verdict.met:
                drafter.drafts.add(late)

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
        """Forwards that decided what others emitted, from their outcomes: each token that was not accepted ended one.

        Forwards whose last row met a draft token that arrived meanwhile are not counted.
        """
        return self.elsewhere.total() - self.elsewhere[Outcome.ACCEPTED]

    def count_all(self, outcomes: Sequence[Outcome]) -> None:
        """The session has ended with this output; other orchestrators may have emitted a part of it."""
        own, self.outcomes = self.outcomes, Counter(outcomes)
        self.elsewhere = self.outcomes - own


# ----------------------------------------------------------------------------------------------------------------------
# What an orchestrator counts beside its sessions' own figures (`SessionStats`, above).


class OrchestratorTally:
    """Counts since the start.

    claims: sessions that were claimed here. fenced: sessions that others claimed.
    append_failures: what the log refused, or did not take in time. refused: requests for which no session was begun, by
    status.
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
        """Tokens of a session were emitted; called before `stats` count them. first: they are the session's first."""
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


# ----------------------------------------------------------------------------------------------------------------------
# What a drafter counts.


class DrafterTally:
    """Since the drafter began. drafted: tokens drawn; proposed: those that went out in proposals.

    due: decided positions within the run-ahead; late: those of them for which nothing had been proposed.
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
        self.refused: Counter[str] = Counter()

    def step(self, spent_ns: int, rows: int, drawn: int) -> None:
        """A forward has ended."""
        self.forward_s.observe(spent_ns / 1e9)
        self.rows.observe(rows)
        self.drafted += drawn
