"""Figures: of one session, of the orchestrator, of all its sessions; and the trace of one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from specwire.core.law.acceptance import DraftCounts, late_counts, window_counts
from specwire.core.messages import (
    Emit,
    FinishReason,
    Outcome,
    SourceKind,
    Verdict,
)
from specwire.telemetry.metrics import GAPS, LATENCIES, Histogram
from specwire.v1 import common_pb2, generation_pb2, verify_pb2

# ----------------------------------------------------------------------------------------------------------------------
# A session's figures, counted from verdicts (forwards, tested) and from what was emitted (outcomes).

MOST_POSITIONS = 32
# A drafter that comes back counts as a new one.
MOST_DRAFTERS = 16


@dataclass(slots=True)
class DrafterCounts:
    """One drafter's figures: what became of its draft tokens, and its last plan.

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
        """Draft tokens of all sources together."""
        total = DraftCounts()
        for counts in self.drafts.values():
            total.add(counts)
        return total

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
        window = window_counts(verdict.outcomes, verdict.width)
        late = late_counts(verdict.outcomes, verdict.width)
        self.drafts[verdict.kind].add(window)
        self.drafts[SourceKind.DRAFTER].add(late)
        for drafter in self.drafters:
            if verdict.kind is SourceKind.DRAFTER and drafter.source == verdict.source:
                drafter.drafts.add(window)
            if drafter.source == verdict.met:
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
        """Forwards that decided what others emitted, from their outcomes: each token that was not accepted ended one.

        Forwards whose last row met a draft token that arrived meanwhile are not counted.
        """
        return self.elsewhere.total() - self.elsewhere[Outcome.ACCEPTED]

    def count_all(self, outcomes: Sequence[Outcome]) -> None:
        """The session has ended with this output; other orchestrators may have emitted a part of it."""
        own, self.outcomes = self.outcomes, Counter(outcomes)
        self.elsewhere = self.outcomes - own


# ----------------------------------------------------------------------------------------------------------------------
# A session's figures on the wire.


def stats_of(known: SessionStats, prompt_tokens: int) -> generation_pb2.Stats:
    outcomes, shown = known.outcomes, known.shown
    ngram, prediction, head = (
        known.drafts[kind] for kind in (SourceKind.NGRAM, SourceKind.PREDICTION, SourceKind.HEAD)
    )
    ended = known.started if known.ended is None else known.ended
    first = known.first_token if known.first_token is not None and known.is_first else known.started
    positions = max((i + 1 for i, n in enumerate(known.tested_at) if n), default=0)
    return generation_pb2.Stats(
        prompt_tokens=prompt_tokens,
        output_tokens=outcomes.total(),
        target_forwards=known.target_forwards + known.forwards_elsewhere,
        forwards_saved=known.forwards_saved,
        proposed=shown.proposed,
        tested=shown.tested,
        accepted=shown.accepted,
        recovered=outcomes[Outcome.RECOVERED],
        bonus=outcomes[Outcome.BONUS],
        direct=outcomes[Outcome.DIRECT],
        time_to_first_token_us=int((first - known.started) * 1e6),
        duration_us=int((ended - known.started) * 1e6),
        tested_at=known.tested_at[:positions],
        accepted_at=known.accepted_at[:positions],
        proposed_ngram=ngram.proposed,
        tested_ngram=ngram.tested,
        accepted_ngram=ngram.accepted,
        proposed_prediction=prediction.proposed,
        tested_prediction=prediction.tested,
        accepted_prediction=prediction.accepted,
        proposed_head=head.proposed,
        tested_head=head.tested,
        accepted_head=head.accepted,
        plan=known.plan,
        drafters=[_drafter(each) for each in known.drafters],
        cached_tokens=known.cached_tokens,
    )


def _drafter(known: DrafterCounts) -> generation_pb2.DrafterStats:
    drafts = known.drafts
    return generation_pb2.DrafterStats(
        source=known.source,
        model=known.model,
        proposed=drafts.proposed,
        tested=drafts.tested,
        accepted=drafts.accepted,
        plan=known.plan,
    )


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
# The figures of all of an orchestrator's sessions together, for metrics.


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
        """The sums of ended sessions and of those that still run."""
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


# ----------------------------------------------------------------------------------------------------------------------
# What happens in one session, for the console: proposals as they arrive, and what verdicts make of them.


def now_us() -> int:
    return time.monotonic_ns() // 1000


@dataclass(frozen=True, slots=True)
class TracedProposal:
    """Draft tokens arrived from drafter `source`, which took draft_us for them.

    offset 0: a new tree, for which it has rolled its cache back to `base`. parents: see `Proposal.parents`.
    """

    source: int
    chain: int
    base: int
    offset: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    draft_us: int
    at_us: int = field(default_factory=now_us)

    @classmethod
    def of(cls, drafted: common_pb2.Proposal) -> TracedProposal:
        tokens = tuple(drafted.tokens)
        parents = tuple(number - distance for number, distance in enumerate(drafted.parents, drafted.offset))
        return cls(drafted.source, drafted.chain, drafted.base, drafted.offset, tokens, parents, drafted.draft_us)


@dataclass(frozen=True, slots=True)
class TracedVerdict:
    """A verdict arrived: tokens from `position` on were decided.

    Attributes:
        tested: draft tokens in its window; kind ("DRAFTER", "NGRAM", ...) and source: whose they were.
        forward_us, waited_us, drafted_us, sessions, rows: of the verifier's step.
        ended_us: when its forward ended, by the verifier's clock: such instants say how far apart forwards were.
        round_trip_us: to the verifier and back, as last measured.
        plan: how the drafters draft by now, and why.
    """

    position: int
    tokens: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    tested: int
    kind: str
    source: int
    forward_us: int
    ended_us: int
    waited_us: int
    drafted_us: int
    sessions: int
    rows: int
    round_trip_us: int
    plan: str
    at_us: int = field(default_factory=now_us)

    @classmethod
    def of(cls, verdict: Verdict, step: verify_pb2.StepTimings, round_trip_us: float, plan: str) -> TracedVerdict:
        return cls(
            position=verdict.position,
            tokens=verdict.tokens,
            outcomes=verdict.outcomes,
            tested=verdict.width,
            kind=verdict.kind.name if verdict.width else "",
            source=verdict.source,
            forward_us=step.forward_us,
            ended_us=step.forward_ended_ns // 1000,
            waited_us=step.waited_us,
            drafted_us=step.drafted_us,
            sessions=step.sessions,
            rows=step.rows,
            round_trip_us=round(round_trip_us),
            plan=plan,
        )


Traced = TracedProposal | TracedVerdict
Trace = Callable[[Traced], None]
