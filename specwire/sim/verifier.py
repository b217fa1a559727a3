"""A verifier under a virtual clock: the core's sessions, scheduler and costs; a forward is the time that it takes.

The order of things is that of `verify_service/engine/engine.py`: commands, plan, forward, commands again (a proposal
that arrived meanwhile still meets the last row), decide. Planning takes no time here, so a step is reported at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from specwire.core.law.acceptance import DraftCounts, late_counts, window_counts
from specwire.core.messages import Proposal, SourceKind, Verdict
from specwire.core.policy.costs import StepCosts, part_of
from specwire.core.policy.estimates import ForwardTimes
from specwire.core.policy.windows import Share, schedule
from specwire.core.verify.session import Allowance, RunningSession, VerifySession
from specwire.sim.clock import Clock, Machine
from specwire.sim.guesses import target_token

# Widths at which V(m) is known at start; a linear V is known everywhere.
WIDTHS = (1, 2, 4, 8, 16, 32)
BATCHES, DEPTHS = (4, 16), (1, 4)


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """Time of a forward: V(1)(1 + slope * draft tokens + session_slope * further sessions), and of prompts beside it.

    V_us: V(1), microseconds. slope: share of it per draft token tested. session_slope: share of it per further session
    of the batch. prefill_us: microseconds per prompt token.
    """

    V_us: float
    slope: float
    session_slope: float
    prefill_us: float = 0.0

    def at(self, sessions: int, drafted: int, prefill: int = 0) -> float:
        further = self.session_slope * max(0, sessions - 1) + self.slope * drafted
        return self.V_us * (1.0 + further) + self.prefill_us * prefill

    def measured(self) -> ForwardTimes:
        """V(m) of one session, as a verifier measures it at start."""
        return ForwardTimes({rows: self.at(1, rows - 1) for rows in WIDTHS})

    def batches(self) -> dict[tuple[int, int], float]:
        """Likewise of several, by (sessions, positions of each)."""
        return {
            (sessions, depth): self.at(sessions, sessions * (depth - 1)) for sessions in BATCHES for depth in DEPTHS
        }


class StepTimes(NamedTuple):
    """A step's own account, told with its verdicts."""

    sessions: int
    rows: int
    forward_us: float
    plain_us: float
    drafts_us: float


@dataclass(frozen=True, slots=True)
class SimVerdict:
    """A verdict on its way; `delay_us`: from the verdict before to the proposal that answered it."""

    verdict: Verdict
    delay_us: float
    ledger_us: float
    step: StepTimes


@dataclass(slots=True, eq=False)
class SimSession:
    """A session in its slot. `cached`: positions that the slot holds. `report` hears of every verdict.

    target: what its text says at a position.
    """

    slot: int
    running: RunningSession
    report: Callable[[SimVerdict], None]
    target: Callable[[int], int] = target_token
    cached: int = 0


class SimPart(NamedTuple):
    share: Share
    held: SimSession
    window: tuple[int, ...]
    source: int | None


def _part(share: Share, held: SimSession) -> SimPart:
    session = held.running.session
    source = session.source if share.kind is SourceKind.DRAFTER else None
    return SimPart(share, held, session.window(share.window, share.kind), source)


@dataclass(slots=True)
class Counts:
    """Work done. drafts: draft tokens, those that arrived during the forward included."""

    forwards: int = 0
    rows: int = 0
    sessions: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    decided: int = 0


@dataclass(slots=True)
class _Pause:
    """Where nothing is computed: since when, and whether on purpose."""

    since_us: float = 0.0
    waiting: bool = False
    waited_us: float = 0.0
    number: int = 0


class SimVerifier:
    """Commands may come at any time; during a forward they wait for its end.

    Args:
        step_us: software between a forward and its verdicts.
        patient: see `specwire.core.policy.windows.schedule`.
    """

    def __init__(
        self, clock: Clock, machine: Machine, cost: ForwardCost, step_us: float = 0.0, patient: bool = False
    ) -> None:
        self.counts = Counts()
        self.costs = StepCosts(cost.measured(), cost.batches())
        self._clock = clock
        self._machine = machine
        self._cost = cost
        self._step_us = step_us
        self._patient = patient
        self._held: dict[int, SimSession] = {}
        self._slots = 0
        self._inbox: list[Callable[[], object]] = []
        self._computing = False
        self._woken = False
        self._pause = _Pause()

    def __len__(self) -> int:
        return len(self._held)

    # Commands

    def open(
        self, session: VerifySession, report: Callable[[SimVerdict], None], target: Callable[[int], int] = target_token
    ) -> SimSession:
        """Take a session in; its prompt is not cached. target: see SimSession."""
        self._slots += 1
        held = SimSession(self._slots, RunningSession(session, self._clock.now_us), report, target)
        self._command(partial(self._held.__setitem__, held.slot, held))
        return held

    def propose(self, held: SimSession, proposal: Proposal) -> None:
        self._command(partial(held.running.propose, proposal, self._clock.now_us))

    def allow(self, held: SimSession, allowance: Allowance) -> None:
        self._command(partial(held.running.allow, allowance, self._clock.now_us))

    def close(self, held: SimSession) -> None:
        self._command(partial(self._held.pop, held.slot, None))

    def _command(self, action: Callable[[], object]) -> None:
        """Commands of one instant are taken in together, as one message brings them."""
        self._inbox.append(action)
        if not self._computing and not self._woken:
            self._woken = True
            self._clock.after(0.0, self._wake)

    def _take_commands(self) -> None:
        inbox, self._inbox = self._inbox, []
        for action in inbox:
            action()

    # Steps

    def _wake(self) -> None:
        self._woken = False
        if self._computing:
            return
        if self._pause.waiting:
            self._pause.waited_us += self._clock.now_us - self._pause.since_us
        self._step()

    def _alarm(self, number: int) -> None:
        if number == self._pause.number and not self._computing and not self._woken:
            self._wake()

    def _step(self) -> None:
        self._take_commands()
        now_us = self._clock.now_us
        runnable = {held.slot: held for held in self._held.values() if held.running.session.room > 0}
        waited_us, plain_us = self._pause.waited_us, self.costs.plain(1)
        candidates = [held.running.candidate(held.slot, held.cached, plain_us, waited_us) for held in runnable.values()]
        V = self.costs.of(sum(each.uncached == 1 for each in candidates))
        plan = schedule(candidates, now_us, V, patient=self._patient, waited_us=waited_us)
        self._pause.since_us, self._pause.waiting = now_us, plan.wait_until_us is not None
        self._pause.number += 1
        if plan.wait_until_us is not None:
            self._clock.after(max(0.0, plan.wait_until_us - now_us), partial(self._alarm, self._pause.number))
        elif plan.shares:
            self._compute([(share, runnable[share.slot]) for share in plan.shares])

    def _compute(self, shares: Sequence[tuple[Share, SimSession]]) -> None:
        self._computing = True
        parts = [_part(share, held) for share, held in shares]
        drafted = sum(len(part.window) for part in parts)
        prefill = sum(part.share.fresh - 1 for part in parts)
        began_us = self._clock.now_us
        self._machine.use(self._cost.at(len(parts), drafted, prefill), partial(self._forward_ended, parts, began_us))

    def _forward_ended(self, parts: Sequence[SimPart], began_us: float) -> None:
        rows, taken_us = sum(part.share.rows for part in parts), self._clock.now_us - began_us
        times = StepTimes(len(parts), rows, taken_us, *self.costs.told(len(parts)))
        if self._step_us:
            self._clock.after(self._step_us, partial(self._decide, parts, times))
        else:
            self._decide(parts, times)

    def _decide(self, parts: Sequence[SimPart], times: StepTimes) -> None:
        self._computing = False
        waited_us, self._pause.waited_us = self._pause.waited_us, 0.0
        self._take_commands()
        plain_us = self._learn(parts, times, waited_us > 0)
        windows = sum(len(part.window) for part in parts)
        self.counts.forwards += 1
        self.counts.rows += times.rows
        self.counts.sessions += times.sessions
        for part in parts:
            part.held.cached += part.share.fresh
            if part.share.decides and part.held.slot in self._held:
                self._resolve(part, part_of(len(part.window), windows, len(parts)), plain_us, waited_us, times)
        self._step()

    def _learn(self, parts: Sequence[SimPart], times: StepTimes, waited: bool) -> float | None:
        """Refine the costs; what the plain step of this batch costs, None if this was one (or held a prompt)."""
        if any(part.share.fresh > 1 or not part.share.decides for part in parts):
            return None
        drafting = any(part.held.running.session.allowance.due for part in parts)
        return self.costs.observe(times.sessions, times.rows, times.forward_us, self._step_us, drafting, waited)

    def _resolve(
        self, part: SimPart, charged: float, plain_us: float | None, waited_us: float, times: StepTimes
    ) -> None:
        held, session = part.held, part.held.running.session
        chosen = [held.target(session.position + index) for index in range(len(part.window) + 1)]
        verdict = session.resolve(chosen, part.window, part.share.kind, part.source)
        held.cached = verdict.position + min(verdict.accepted, len(part.window))
        answer = held.running.decided(self._clock.now_us, len(verdict.tokens), plain_us, waited_us, charged)
        self.counts.drafts.add(window_counts(verdict.outcomes, verdict.width))
        self.counts.drafts.add(late_counts(verdict.outcomes, verdict.width))
        self.counts.decided += len(verdict.tokens)
        held.report(SimVerdict(verdict, answer.delay_us, session.ledger.balance_us, times))
        if verdict.finish is not None:
            del self._held[held.slot]
