"""The figures of sessions, on the wire and of all of them together; and the trace of one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from specwire.core.messages import FinishReason, Outcome, SourceKind, Verdict
from specwire.telemetry.tally import DrafterCounts, SessionStats
from specwire.v1 import common_pb2, generation_pb2, verify_pb2

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
