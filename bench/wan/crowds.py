"""Further cells of the sweep: 1 to 32 sessions at once, a drafter on the verifier's host, n-grams beside a drafter.

A setting's speed is that of all sessions together while the batch is full: where one ends the next begins, from what
that one has learnt, and the first ones are not counted. Each session has a trace of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.wan.cells import V_MS
from bench.wan.traces import acceptance, recorded, with_acceptance
from specwire import sim

SESSIONS = (1, 2, 4, 8, 16, 32)
TOKENS = 64
# Sessions of a cell that are counted, as far as there are not more at once.
COUNTED = 8
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

    def cells(self) -> list[sim.Cell]:
        """Sessions that follow one another: the first ones, those that are counted, and those after them."""
        nearest = sorted(recorded(), key=lambda trace: abs(acceptance(trace) - self.acceptance))
        traces = [with_acceptance(trace, self.acceptance) for trace in nearest]
        number = 2 * self.sessions + max(COUNTED, self.sessions)
        return [self._session(number, traces[number % len(traces)]) for number in range(number)]

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
    """Tokens per second of all sessions together."""
    return sim.simulate_batch(crowd.cells(), policy, crowd.sessions).tokens_per_second


def best_fixed(crowd: Crowd) -> tuple[str, float]:
    """The fastest of SETTINGS, and its speed."""
    speeds = {setting: speed(crowd, sim.fixed(setting)) for setting in SETTINGS}
    best = max(speeds, key=speeds.__getitem__)
    return best, speeds[best]
