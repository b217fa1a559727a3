"""Many sessions over several verifiers and drafters: a pool. Pools share nothing that a token waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from specwire.core.session import buffer_for
from specwire.sim.clock import Clock, Machine
from specwire.sim.drafter import SimDrafter
from specwire.sim.guesses import Guesses, drawn_trace
from specwire.sim.orchestrator import Delays, SimOrchestrator, SimStats
from specwire.sim.simulation import AUTO, InvalidCell, Policy, check_numbers
from specwire.sim.verifier import ForwardCost, SimVerifier


@dataclass(frozen=True, slots=True)
class SimFleet:
    """Microseconds throughout; `V_us`, `slope`, `append_us`, `drafter_rtt_us`, `buffer` as in `Cell`.

    Attributes:
        sessions: in all; they arrive at `arrivals_per_second` (Poisson), and wait in order for a free place.
        verifiers, drafters: a session takes those that have the fewest sessions. slots: sessions of one verifier.
        session_slope: share of V_us that each further session of a batch adds; None: as a draft token.
        prefill_us: per prompt token. draft_slope: share of draft_us that each further session of a pass adds.
        rtts_us: each session's round trip to its verifier is one of these, all equally likely.
        traces: of each session by its number, whether each guess is right; none: drawn, with `acceptance`.
    """

    sessions: int
    verifiers: int
    drafters: int
    V_us: float
    slope: float
    draft_us: float
    arrivals_per_second: float
    rtts_us: Sequence[float] = (20_000.0,)
    acceptance: float = 0.8
    traces: Sequence[Sequence[bool]] = ()
    session_slope: float | None = None
    draft_slope: float = 0.0
    prompt: int = 64
    prefill_us: float = 0.0
    tokens: int = 128
    slots: int = 64
    append_us: float = 0.0
    drafter_rtt_us: float = 0.0
    buffer: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        times = "slope session_slope draft_slope prefill_us append_us drafter_rtt_us"
        counts = "sessions verifiers drafters slots prompt tokens buffer"
        check_numbers(self, "V_us draft_us arrivals_per_second", times, counts, "acceptance")
        if not self.rtts_us or not all(0 <= each < float("inf") for each in self.rtts_us):
            raise InvalidCell(f"rtts_us: must be one or more times, none of them negative, not {list(self.rtts_us)}")
        if self.traces and (len(self.traces) < self.sessions or not all(self.traces)):
            raise InvalidCell(f"traces: must be one for each of {self.sessions} sessions, none of them empty")

    @property
    def cost(self) -> ForwardCost:
        between = self.slope if self.session_slope is None else self.session_slope
        return ForwardCost(self.V_us, self.slope, between, self.prefill_us)


@dataclass(frozen=True, slots=True)
class FleetResult:
    """Percentiles are of sessions, at 50, 95 and 99 %.

    Attributes:
        elapsed_us: from the first arrival to the last token.
        first_us: time to the first token, waiting for a place included.
        per_token_us: a session's mean time between tokens after its first emission.
        verifier_share, drafter_share: of the elapsed time that they computed.
        batch: sessions of a forward, mean. most_at_once: sessions that had a place.
    """

    sessions: int
    tokens: int
    elapsed_us: float
    first_us: tuple[float, ...]
    per_token_us: tuple[float, ...]
    verifier_share: float
    drafter_share: float
    batch: float
    most_at_once: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.elapsed_us * 1e6


@dataclass(slots=True, eq=False)
class _Place:
    verifier: SimVerifier
    machine: Machine
    sessions: int = 0


class _Pool:
    """Takes sessions in as they arrive. Invariant: no place has more than `slots` sessions."""

    def __init__(self, fleet: SimFleet, policy: Policy) -> None:
        self.clock = Clock()
        self.fleet = fleet
        self.policy = policy
        self.random = Random(fleet.seed)
        self.places = [self._place() for _ in range(fleet.verifiers)]
        self.draft_machines = [Machine(self.clock) for _ in range(fleet.drafters)]
        self.drafters = [
            SimDrafter(self.clock, each, fleet.draft_us, fleet.draft_slope, branching=False)
            for each in self.draft_machines
        ]
        self.drafting = [0] * fleet.drafters
        self.waiting: deque[tuple[int, float]] = deque()
        self.ended: list[SimStats] = []
        self.most_at_once = 0

    def _place(self) -> _Place:
        machine, cost = Machine(self.clock), self.fleet.cost
        verifier = SimVerifier(self.clock, machine, cost, patient=self.policy.patient, slots=self.fleet.slots)
        return _Place(verifier, machine)

    def run(self) -> None:
        self._expect(0)
        self.clock.run()

    def _expect(self, number: int) -> None:
        if number < self.fleet.sessions:
            self.clock.after(
                self.random.expovariate(self.fleet.arrivals_per_second) * 1e6, lambda: self._arrive(number)
            )

    def _arrive(self, number: int) -> None:
        self.waiting.append((number, self.clock.now_us))
        self._admit()
        self._expect(number + 1)

    def _admit(self) -> None:
        while self.waiting:
            place = min(self.places, key=lambda each: each.sessions)
            if place.sessions >= self.fleet.slots:
                return
            self._start(place, *self.waiting.popleft())

    def _start(self, place: _Place, number: int, arrived_us: float) -> None:
        fleet = self.fleet
        drafter = min(range(fleet.drafters), key=self.drafting.__getitem__)
        right = (
            fleet.traces[number] if fleet.traces else drawn_trace(fleet.acceptance, fleet.tokens, fleet.seed + number)
        )
        guesses = Guesses(fleet.prompt, right)
        rtt_us = self.random.choice(list(fleet.rtts_us))
        delays = Delays(rtt_us / 2, fleet.drafter_rtt_us / 2, fleet.append_us)
        orchestrator = SimOrchestrator(
            self.clock,
            place.verifier,
            self.drafters[drafter] if self.policy.drafting else None,
            self.policy.assigned(shares_cores=False),
            guesses,
            delays,
            fleet.tokens,
            buffer_for(rtt_us, fleet.V_us, fleet.buffer),
            lambda ended: self._leave(ended, place, drafter),
        )
        orchestrator.stats.asked_us = arrived_us
        place.sessions += 1
        self.drafting[drafter] += 1
        self.most_at_once = max(self.most_at_once, sum(each.sessions for each in self.places))
        orchestrator.start()

    def _leave(self, orchestrator: SimOrchestrator, place: _Place, drafter: int) -> None:
        place.sessions -= 1
        self.drafting[drafter] -= 1
        self.ended.append(orchestrator.stats)
        if len(self.ended) == self.fleet.sessions:
            self.clock.stop()
        self._admit()


def simulate_fleet(fleet: SimFleet, policy: Policy = AUTO) -> FleetResult:
    """Run all sessions to their ends."""
    pool = _Pool(fleet, policy)
    pool.run()
    began_us = min(stats.asked_us for stats in pool.ended)
    elapsed_us = max(stats.last_us for stats in pool.ended) - began_us
    forwards = sum(place.verifier.engine.steps for place in pool.places)
    return FleetResult(
        sessions=len(pool.ended),
        tokens=sum(stats.tokens for stats in pool.ended),
        elapsed_us=elapsed_us,
        first_us=_percentiles([stats.first_us - stats.asked_us for stats in pool.ended]),
        per_token_us=_percentiles([_per_token_us(stats) for stats in pool.ended]),
        verifier_share=sum(place.machine.busy_us for place in pool.places) / (elapsed_us * fleet.verifiers),
        drafter_share=sum(each.busy_us for each in pool.draft_machines) / (elapsed_us * fleet.drafters),
        batch=sum(place.verifier.engine.tally.sessions.sum for place in pool.places) / forwards,
        most_at_once=pool.most_at_once,
    )


def _per_token_us(stats: SimStats) -> float:
    return (stats.last_us - stats.first_us) / max(1, stats.tokens - stats.first_tokens)


def _percentiles(values: Sequence[float]) -> tuple[float, ...]:
    ordered = sorted(values)
    return tuple(ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.50, 0.95, 0.99))
