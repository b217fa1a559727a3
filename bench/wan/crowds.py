"""Further cells of the sweep: 1 to 32 sessions at once, a drafter on the verifier's host, n-grams beside a drafter.

A setting's speed is that of all sessions together, until the last one's last token. Each session has its own trace, and
each batch starts from what the one before has learnt; a batch before the first is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.wan.cells import V_MS
from bench.wan.traces import acceptance, recorded, with_acceptance
from specwire import sim
from specwire.core.policy.controller import Planner

SESSIONS = (1, 2, 4, 8, 16, 32)
TOKENS = 64
# Tokens of all batches of a cell that are counted, as far as one batch does not hold more.
COUNTED = 512
SETTINGS = (
    "off",
    *("lockstep:1", "lockstep:2", "lockstep:4", "lockstep:8"),
    *("stream:1,4,0", "stream:1,16,0", "stream:1,8,2", "stream:4,32,4"),
)


@dataclass(frozen=True, slots=True)
class Crowd:
    """V(n, m) = V_ms (1 + slope (draft tokens) + slope_between (further sessions)).

    contention: drafter and verifier share a host, and while both compute each takes so many times as long; None: apart.
    repeats: of the text, which the verifier then guesses from; 0: it does not.
    """

    draft_ms: float
    acceptance: float
    slope: float
    contention: float | None = None
    rtt_ms: float = 0.0
    repeats: float = 0.0
    sessions: int = 1
    slope_between: float = 0.0
    V_ms: float = V_MS

    @property
    def name(self) -> str:
        where = f"R{self.rtt_ms:g}" if self.contention is None else f"c{self.contention:g}"
        text = f"-g{self.repeats:g}" if self.repeats else ""
        return f"n{self.sessions}-{where}-d{self.draft_ms:g}-a{self.acceptance:g}-s{self.slope:g}{text}"

    def of(self, sessions: int) -> Crowd:
        """The same place with so many sessions."""
        kept = (self.draft_ms, self.acceptance, self.slope, self.contention, self.rtt_ms, self.repeats)
        return Crowd(*kept, sessions, self.slope_between, self.V_ms)

    def batches(self) -> Iterator[list[sim.Cell]]:
        """Batches that follow one another; the first is the one before them."""
        nearest = sorted(recorded(), key=lambda trace: abs(acceptance(trace) - self.acceptance))
        traces = [with_acceptance(trace, self.acceptance) for trace in nearest]
        turns = max(1, COUNTED // (TOKENS * self.sessions))
        for turn in range(1 + turns):
            first = turn * self.sessions
            yield [
                self._session(number, traces[number % len(traces)]) for number in range(first, first + self.sessions)
            ]

    def _session(self, number: int, trace: str) -> sim.Cell:
        return sim.Cell(
            V_us=self.V_ms * 1000,
            slope=self.slope,
            draft_us=self.draft_ms * 1000,
            rtt_us=self.rtt_ms * 1000,
            trace=[bit == "1" for bit in trace],
            seed=number,
            tokens=TOKENS,
            shared_host=self.contention is not None,
            contention=self.contention,
            session_slope=self.slope_between,
            draft_slope=DRAFT_SLOPE,
            repeats=self.repeats,
        )


# Of a drafter's pass, for each further session.
DRAFT_SLOPE = 0.05


def places() -> list[Crowd]:
    """Each for all SESSIONS. A GPU's rows cost next to nothing (0.02), a CPU's a good part of a forward (0.15)."""
    return [
        *(Crowd(1.0, 0.9, 0.02, 1.3), Crowd(3.0, 0.6, 0.15, 1.3, slope_between=0.2), Crowd(8.0, 0.8, 0.02, 1.3)),
        *(Crowd(3.0, 0.4, 0.15, 1.3, slope_between=0.2), Crowd(3.0, 0.8, 0.15, 1.3, slope_between=0.2)),
        *(Crowd(1.0, 0.9, 0.15, 2.0, slope_between=0.2), Crowd(3.0, 0.6, 0.15, 2.0, slope_between=0.2)),
        *(Crowd(3.0, 0.6, 0.02, 2.0, slope_between=0.02), Crowd(8.0, 0.6, 0.15, 2.0, slope_between=0.2)),
        *(Crowd(3.0, 0.6, 0.15, slope_between=0.2), Crowd(8.0, 0.8, 0.02, rtt_ms=20.0, slope_between=0.02)),
        *(Crowd(3.0, 0.4, 0.15, rtt_ms=50.0, slope_between=0.2), Crowd(1.0, 0.8, 0.05, slope_between=0.05)),
        *(Crowd(3.0, 0.6, 0.02, 1.3, repeats=0.5, slope_between=0.02),),
        *(Crowd(3.0, 0.4, 0.15, 2.0, repeats=0.5, slope_between=0.2),),
        *(Crowd(3.0, 0.6, 0.02, rtt_ms=20.0, repeats=0.5, slope_between=0.02),),
    ]


def crowds() -> Iterator[Crowd]:
    for place in places():
        for sessions in SESSIONS:
            yield place.of(sessions)


def speed(crowd: Crowd, policy: sim.Policy = sim.AUTO) -> float:
    """Tokens per second over all batches but the first, each from what the one before has learnt."""
    experience: Planner | None = None
    tokens, elapsed_us = 0, 0.0
    for turn, cells in enumerate(crowd.batches()):
        batch = sim.simulate_batch(cells, policy, experience)
        experience = batch.planner
        if turn:
            tokens, elapsed_us = tokens + batch.tokens, elapsed_us + batch.elapsed_us
    return tokens / elapsed_us * 1e6


def best_fixed(crowd: Crowd) -> tuple[str, float]:
    """The fastest of SETTINGS, and its speed."""
    speeds = {setting: speed(crowd, sim.fixed(setting)) for setting in SETTINGS}
    best = max(speeds, key=speeds.__getitem__)
    return best, speeds[best]
