"""One session, one drafter, one verifier: a cell of the grid in which drafting policies are compared."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from specwire.core.invalid import InvalidParameter
from specwire.core.messages import AssignedDrafter, parse_plan
from specwire.core.policy.drafters import LearntDrafters
from specwire.core.session import buffer_for
from specwire.sim.clock import STEADY, Clock, Drift, Machine
from specwire.sim.drafter import SimDrafter
from specwire.sim.guesses import RANKS, Guesses, drawn_trace, repeating_text
from specwire.sim.orchestrator import SOURCE, Delays, Planned, SimOrchestrator, SimStats
from specwire.sim.verifier import ForwardCost, SimVerifier, by_thumb
from specwire.telemetry.tally import DraftCounts

# ----------------------------------------------------------------------------------------------------------------------
# How a session is to be drafted for, by name.


@dataclass(frozen=True, slots=True)
class Policy:
    """plan: auto[:BRANCHES], or a fixed one. patient: the verifier waits for all that is due, whatever it costs, and
    keeps no ledger. drafting: there is a drafter. heads: a verifier's head may draft, too, where a cell has one.
    thumb: what guesses from texts are tested is planned by a rule of thumb.
    """

    name: str
    plan: str = "auto"
    patient: bool = False
    drafting: bool = True
    heads: bool = False
    thumb: bool = False

    def assigned(self, shares_cores: bool, branching: bool = False) -> AssignedDrafter:
        """The drafter. branching: it can."""
        plan = "auto:1" if self.plan.startswith("auto") and not branching else self.plan
        return AssignedDrafter(SOURCE, "drafter", shares_cores, plan)


AUTO, CHAIN = Policy("auto", heads=True), Policy("auto:1", "auto:1", heads=True)
PLAIN = Policy("plain", "off", drafting=False)
# The head alone.
HEADS = Policy("heads", "off", drafting=False, heads=True)
# The rule of thumb that the planner must be worth: n-grams if greedy or alone, else nothing. Each guess is tested
# whole, whatever its rows cost; all simulated texts are greedy.
RULE = Policy("rule", "off", drafting=False, thumb=True)


def fixed(spec: str) -> Policy:
    """A plan as `core.messages.parse_plan` reads it."""
    parse_plan(spec)
    return Policy(spec, spec)


def textbook(k: int) -> Policy:
    """Draft k tokens, send them, wait for the verdict; the verifier waits for all k."""
    return Policy(f"textbook:{k}", f"lockstep:{k}", patient=True)


def stream_wait(chunk: int, run_ahead: int) -> Policy:
    """Streaming, with a verifier that never runs without a live draft token."""
    return Policy(f"stream-wait:{chunk},{run_ahead}", f"stream:{chunk},{run_ahead},1", patient=True)


def parse_policy(spec: str) -> Policy:
    """auto[:BRANCHES], plain, heads, rule, off, lockstep:K, stream:CHUNK,RUN_AHEAD[,DUE], textbook:K or
    stream-wait:CHUNK,RUN_AHEAD.

    Raises:
        InvalidParameter: `spec` reads otherwise.
    """
    name, _, numbers = spec.partition(":")
    try:
        match name, [int(number) for number in numbers.split(",")] if numbers else []:
            case "auto", []:
                return AUTO
            case "auto", _:
                parse_plan(spec)
                return Policy(spec, spec, heads=True)
            case "plain", []:
                return PLAIN
            case "heads", []:
                return HEADS
            case "rule", []:
                return RULE
            case "textbook", [k]:
                parse_plan(f"lockstep:{k}")
                return textbook(k)
            case "stream-wait", [chunk, run_ahead]:
                parse_plan(f"stream:{chunk},{run_ahead},1")
                return stream_wait(chunk, run_ahead)
        return fixed(spec)
    except ValueError as error:
        raise InvalidParameter(
            "policy",
            f"must be auto[:BRANCHES], plain, heads, rule, off, lockstep:K, stream:CHUNK,RUN_AHEAD[,DUE], textbook:K "
            f"or stream-wait:CHUNK,RUN_AHEAD, not {spec!r}",
        ) from error


# ----------------------------------------------------------------------------------------------------------------------
# What is simulated.


class InvalidCell(ValueError):
    """A setting that cannot be simulated; the message names it."""


def check_numbers(of: object, positive: str, not_negative: str, counts: str, shares: str) -> None:
    """InvalidCell for a setting, of these by name, that is out of its range."""
    for names, least, most, must in (
        (positive, math.ulp(0.0), sys.float_info.max, "be positive"),
        (not_negative, 0.0, sys.float_info.max, "not be negative"),
        (counts, 1.0, float("inf"), "be at least 1"),
        (shares, 0.0, 1.0, "be from 0 to 1"),
    ):
        for name in names.split():
            value = getattr(of, name)
            if value is not None and not least <= value <= most:
                raise InvalidCell(f"{name}: must {must}, not {value}")


@dataclass(frozen=True, slots=True)
class Cell:
    """Microseconds throughout.

    Attributes:
        V_us, slope: the target's forward takes V(m) = V_us (1 + slope (m - 1)).
        draft_us: a draft token.
        steps: instead of slopes, V(m) / V_us of the first rows, as of quantised products.
        rtt_us: round trip between the edge (orchestrator, and the drafter with it) and the verifier.
        acceptance, seed: output token i is guessed right with this probability, independently of the others.
        ranks, scores: instead: where the target's token i stands among the drafter's best, None for nowhere, and the
            scores of these, falling from 0, in nats; begins again at its end. Then drafters may branch.
        trace: instead: trace[i] says whether output token i is guessed right; begins again at its end.
        tokens: of the output.
        shared_host: drafter and verifier compute on the same cores, never at the same time.
        session_slope: share of V_us that each further session of a batch adds; None: as a draft token. draft_slope:
            share of draft_us that each further session of a pass adds. row_slope: each further token that it extends.
        repeats: this share of the text is copied from before it, and the verifier guesses from the text.
        head: of a head beside the target, by position how often its token is right where those before it were; none:
            there is no head. head_us: its forward, for however many sessions. What it reads takes no time. tapped_us:
            by which a forward of the target is longer where features are kept for it.
        append_us: until the session log acknowledges an append.
        drafter_rtt_us: round trip between orchestrator and drafter.
        hop_us: software of every message on its way from one process to the next.
        step_us: software of the verifier between a forward and its verdicts.
        drift: of the machine's speed, all that computes together.
        buffer: tokens that the verifier may decide beyond what is durable; more where the round trip asks for them.
    """

    V_us: float
    slope: float
    draft_us: float
    rtt_us: float
    acceptance: float = 0.8
    seed: int = 0
    trace: Sequence[bool] | None = None
    ranks: Sequence[int | None] = ()
    scores: Sequence[Sequence[float]] = ()
    tokens: int = 256
    shared_host: bool = False
    session_slope: float | None = None
    draft_slope: float = 0.0
    row_slope: float = 0.0
    repeats: float = 0.0
    head: Sequence[float] = ()
    head_us: float = 0.0
    tapped_us: float = 0.0
    append_us: float = 0.0
    drafter_rtt_us: float = 0.0
    hop_us: float = 0.0
    step_us: float = 0.0
    steps: Sequence[float] = ()
    drift: Drift = STEADY
    buffer: int = 64

    def __post_init__(self) -> None:
        times = "slope row_slope rtt_us tapped_us append_us drafter_rtt_us hop_us step_us"
        check_numbers(self, "V_us draft_us", times, "tokens buffer", "acceptance repeats")
        if self.trace is not None and not len(self.trace):
            raise InvalidCell("trace: must not be empty")
        if len(self.ranks) != len(self.scores) or not all(1 <= len(found) <= RANKS for found in self.scores):
            raise InvalidCell(f"scores: must be from 1 to {RANKS} for each of {len(self.ranks)} ranks")
        if not all(0 <= rate <= 1 for rate in self.head):
            raise InvalidCell(f"head: must be from 0 to 1 at each position, not {list(self.head)}")
        if not (0 < self.head_us < float("inf") if self.head else self.head_us == 0):
            raise InvalidCell(f"head_us: must be positive where there is a head, else 0, not {self.head_us}")

    @property
    def branching(self) -> bool:
        """Whether drafters may branch: they need several guesses of a place."""
        return bool(self.ranks)

    def guesses(self) -> Guesses:
        if self.ranks:
            right: Sequence[bool] = [rank == 0 for rank in self.ranks]
        else:
            right = drawn_trace(self.acceptance, self.tokens, self.seed) if self.trace is None else self.trace
        text = repeating_text(self.repeats, self.tokens + 1, self.seed) if self.repeats else ()
        head = [drawn_trace(rate, self.tokens, hash((self.seed, depth))) for depth, rate in enumerate(self.head)]
        return Guesses(1, right, text, self.ranks, self.scores, head)

    @property
    def cost(self) -> ForwardCost:
        between = self.slope if self.session_slope is None else self.session_slope
        return ForwardCost(self.V_us, self.slope, between, steps=self.steps)

    @property
    def delays(self) -> Delays:
        return Delays(self.rtt_us / 2 + self.hop_us, self.drafter_rtt_us / 2 + self.hop_us, self.append_us)


@dataclass(frozen=True, slots=True)
class Result:
    """What a session's client saw, from its request on, and what was done for it.

    Attributes:
        tokens, elapsed_us, time_to_first_us: until the last token, and the first. undrifted_us: as elapsed_us would be
            at the machine's own speed.
        steady_tokens_per_second: of what came after the first emission; opening and prefill do not count.
        forwards: steps of the verifier.
        extended: tokens that a forward of the drafter extended, on average; 0 without any.
        drafts: what became of draft tokens; headed: of a head's, which are among them.
        forwards_saved: tokens that forwards decided beyond one each.
        ledger_us: the last balance that the verifier told.
        plans: each change of plan, with its time and reason.
        learnt: what its verifier knows of the drafter by then; another session may begin with it.
    """

    tokens: int
    elapsed_us: float
    undrifted_us: float
    time_to_first_us: float
    steady_tokens_per_second: float
    forwards: int
    extended: float
    drafts: DraftCounts
    headed: DraftCounts
    forwards_saved: int
    ledger_us: float
    plans: tuple[Planned, ...]
    learnt: LearntDrafters

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.elapsed_us * 1e6


def simulate(cell: Cell, policy: Policy = AUTO, learnt: LearntDrafters | None = None) -> Result:
    """Run one session to its end. learnt: in sessions before it."""
    run = _Run(cell, policy, 1)
    if learnt is not None:
        run.verifier.engine.sessions.drafters = learnt
    run.begin(cell, run.drafters[0])
    run.clock.run()
    return _result(run.ended[0], run.verifier, run.drafters[0], run.clock.drift)


def simulate_batch(cells: Sequence[Cell], policy: Policy = AUTO, sessions: int = 1, drafters: int = 1) -> Batch:
    """Run so many `sessions` at once at one verifier, spread over so many drafters; a cell begins where one has ended.

    Each starts from what was learnt in the one before it. Counted is what is decided from the time when so many have
    ended until all but so many have: the batch is always full. It stays so, by the last cell again and again, until all
    have ended that began meanwhile. The cells differ in their texts and guesses only.
    """
    if len(cells) <= 2 * sessions:
        raise InvalidCell(f"cells: must be more than {2 * sessions} for {sessions} sessions, not {len(cells)}")
    run = _Run(cells[0], policy, sessions, drafters)
    waiting = chain(cells[sessions:], repeat(cells[-1]))
    counted: list[tuple[float, int]] = []
    begun: list[SimOrchestrator] = []

    def on_ended(ended: SimOrchestrator) -> None:
        if len(run.ended) in (sessions, len(cells) - sessions):
            counted.append((run.clock.now_us, run.verifier.decided))
        if len(counted) == 2 and set(begun) <= set(run.ended):
            run.clock.stop()
            return
        following = next(waiting)
        later = run.begin(following, ended.drafter)
        if len(counted) == 1:
            begun.append(later)

    run.on_ended = on_ended
    for number, cell in enumerate(cells[:sessions]):
        run.begin(cell, run.drafters[number % drafters])
    run.clock.run()
    (began_us, before), (ended_us, after) = counted[0], counted[-1]
    forwards, tally = run.verifier.engine.steps, run.verifier.engine.tally
    return Batch(
        tokens=after - before,
        elapsed_us=ended_us - began_us,
        plans=tuple(run.ended[-1].plans),
        begun=tuple(each.stats for each in begun),
        window=tally.rows.sum / tally.sessions.sum - 1,
        forward_us=tally.forward_s.sum * 1e6 / forwards,
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of all sessions, and the time they took; `plans` of the session that ended last.

    begun: the sessions that began within that time, whenever they ended. window: draft tokens of a session in a
    forward, and forward_us: what a forward took, both on average and from the beginning.
    """

    tokens: int
    elapsed_us: float
    plans: tuple[Planned, ...]
    begun: tuple[SimStats, ...]
    window: float
    forward_us: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.elapsed_us * 1e6


class _Run:
    """A verifier, its drafters, and the sessions there. on_ended: is told of each that ends."""

    def __init__(self, cell: Cell, policy: Policy, sessions: int, drafters: int = 1) -> None:
        self.clock = Clock(cell.drift)
        self.ended: list[SimOrchestrator] = []
        target = Machine(self.clock)
        slots, head = sessions, (cell.head_us, len(cell.head), cell.tapped_us)
        self.verifier = SimVerifier(self.clock, target, cell.cost, cell.step_us, policy.patient, slots, *head)
        if policy.thumb:
            self.verifier.engine.plan = by_thumb
        machines = [target if cell.shared_host else Machine(self.clock) for _ in range(drafters)]
        self.drafters = [
            SimDrafter(self.clock, each, cell.draft_us, cell.draft_slope, cell.row_slope, cell.branching)
            for each in machines
        ]
        self.on_ended: Callable[[SimOrchestrator], None] = lambda _: self.clock.stop()
        self._policy = policy

    def begin(self, cell: Cell, drafter: SimDrafter | None) -> SimOrchestrator:
        orchestrator = SimOrchestrator(
            self.clock,
            self.verifier,
            drafter if self._policy.drafting else None,
            self._policy.assigned(cell.shared_host, cell.branching),
            cell.guesses(),
            cell.delays,
            cell.tokens,
            buffer_for(cell.rtt_us, cell.V_us, cell.buffer),
            self._on_ended,
            ngram=cell.repeats > 0,
            head=self._policy.heads and len(cell.head) > 0,
        )
        orchestrator.start()
        return orchestrator

    def _on_ended(self, orchestrator: SimOrchestrator) -> None:
        self.ended.append(orchestrator)
        self.on_ended(orchestrator)


def _result(orchestrator: SimOrchestrator, verifier: SimVerifier, drafter: SimDrafter, drift: Drift) -> Result:
    stats, forwards = orchestrator.stats, verifier.engine.steps
    rest_us = stats.last_us - stats.first_us
    return Result(
        tokens=stats.tokens,
        elapsed_us=stats.last_us,
        undrifted_us=drift.undrifted_us(stats.last_us),
        time_to_first_us=stats.first_us,
        steady_tokens_per_second=(stats.tokens - stats.first_tokens) / rest_us * 1e6 if rest_us else 0.0,
        forwards=forwards,
        extended=drafter.extended,
        drafts=verifier.drafts,
        headed=verifier.headed,
        forwards_saved=verifier.decided - forwards,
        ledger_us=stats.ledger_us,
        plans=tuple(orchestrator.plans),
        learnt=verifier.engine.sessions.drafters,
    )
