"""What happens in one session, for somebody who looks on: proposals as they arrive, and what verdicts make of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.output import OutputTimings
from specwire.core.acceptance import Outcome
from specwire.core.chain import Proposal
from specwire.core.events import VerdictArrived
from specwire.v1 import verify_pb2


def now_us() -> int:
    return time.monotonic_ns() // 1000


@dataclass(frozen=True, slots=True)
class TracedProposal:
    """Draft tokens arrived from drafter `source`, which took draft_us for them.

    offset 0: a new chain, for which it has rolled its cache back to `base`.
    """

    source: int
    chain: int
    base: int
    offset: int
    tokens: tuple[int, ...]
    draft_us: int
    at_us: int = field(default_factory=now_us)

    @classmethod
    def of(cls, proposal: Proposal, draft_us: int) -> TracedProposal:
        return cls(proposal.source, proposal.chain, proposal.base, proposal.offset, proposal.tokens, draft_us)


@dataclass(frozen=True, slots=True)
class TracedVerdict:
    """A verdict arrived: tokens from `position` on were decided.

    Attributes:
        tested: draft tokens in its window; kind ("DRAFTER", "NGRAM", ...) and source: whose they were.
        forward_us, waited_us, sessions, rows: of the verifier's step.
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
    sessions: int
    rows: int
    round_trip_us: int
    plan: str
    at_us: int = field(default_factory=now_us)

    @classmethod
    def of(
        cls, event: VerdictArrived, verdict: verify_pb2.Verdict, timings: OutputTimings, round_trip_us: float, plan: str
    ) -> TracedVerdict:
        step = timings.step
        return cls(
            position=event.position,
            tokens=event.tokens,
            outcomes=event.outcomes,
            tested=verdict.tested,
            kind=event.kind.name if verdict.tested else "",
            source=verdict.source,
            forward_us=step.forward_us,
            ended_us=step.forward_ended_ns // 1000,
            waited_us=step.waited_us,
            sessions=step.sessions,
            rows=step.rows,
            round_trip_us=round(round_trip_us),
            plan=plan,
        )


Traced = TracedProposal | TracedVerdict
Trace = Callable[[Traced], None]
