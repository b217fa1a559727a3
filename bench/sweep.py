"""The planner against the best fixed setting of every cell of the grid, in virtual time: python -m bench.sweep.

A cell is a place and an acceptance; which tokens are guessed right is chance. A setting that happens to suit one trace
is not the cell's best, so a setting's speed is that over several recorded traces, each a session of its own, and the
planner has to come up to the best of all settings over the same sessions, with branches or without. It gets no
settings: each of its sessions starts from what the one before has learnt, as behind an orchestrator, and a session
before the first is not counted.

The grid is one session with a drafter of its own. Crowds are further cells: 1 to 32 sessions at once, a drafter on the
verifier's host, n-grams beside a drafter. Their speed is that of all sessions together while the batch is full: where
one ends the next begins, from what that one has learnt, and the first ones are not counted. Each has its own trace.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench.harness import RESULTS
from bench.harness.interleave import tracked
from bench.harness.interval import Estimate
from bench.harness.processes import in_processes
from bench.harness.record import save
from bench.harness.report import Bar, at_least, bar_lines, table
from bench.wan.cells import TOKENS, V_MS, WanCell, grid
from bench.wan.traces import GREEDY, acceptance, nearest, recorded, with_acceptance
from bench.wan.virtual import Software, as_simulated
from specwire import sim
from specwire.rpc.process import say

OUT = RESULTS / "sweep.json"
NEEDED = 0.95
# A setting with branches takes seconds to simulate: more traces would be more than half an hour on two cores.
TRACES = 3
WORST = 12
SAY_EVERY = 36
# Crowds: so many at once, of so many tokens each.
SESSIONS = (1, 2, 4, 8, 16, 32)
CROWD_TOKENS = 64
# Sessions of a cell that are counted, as far as there are not more at once.
COUNTED = 8
SETTINGS = (
    "off",
    *("lockstep:1", "lockstep:2", "lockstep:4", "lockstep:8"),
    *("stream:1,4,0", "stream:1,16,0", "stream:1,8,2", "stream:4,32,4"),
)
# V(m) / V(1) of models that people run, of the first rows: bfloat16, and llama.cpp's quantised products.
FLAT, STEPS = tuple(1.0 + 0.016 * rows for rows in range(64)), (1.0, *[1.55] * 3, *[2.7] * 4, *[3.1] * 8, *[6.0] * 16)
# Of a drafter's pass, for each further session.
DRAFT_SLOPE = 0.05


@dataclass(frozen=True, slots=True)
class Crowd:
    """Sessions at once in one place: V(n, m) = V_ms (1 + slope (draft tokens) + slope_between (further sessions)).

    shared: drafter and verifier share cores.
    steps: V(m) / V(1) of the first rows, instead. repeats: of the text, from which the verifier then guesses; 0: none.
    """

    draft_ms: float
    acceptance: float
    slope: float
    shared: bool = False
    rtt_ms: float = 0.0
    repeats: float = 0.0
    sessions: int = 1
    slope_between: float = 0.0
    V_ms: float = V_MS
    steps: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        where = "shared" if self.shared else f"R{self.rtt_ms:g}"
        text = f"-g{self.repeats:g}" if self.repeats else ""
        if self.steps:
            text += f"-V{self.V_ms:g}-x{self.steps[3]:g}"
        return f"n{self.sessions}-{where}-d{self.draft_ms:g}-a{self.acceptance:g}-s{self.slope:g}{text}"

    def of(self, sessions: int) -> Crowd:
        """The same place with so many sessions."""
        kept = (self.draft_ms, self.acceptance, self.slope, self.shared, self.rtt_ms, self.repeats)
        return Crowd(*kept, sessions, self.slope_between, self.V_ms, self.steps)

    def cells(self) -> list[sim.Cell]:
        """Sessions that follow one another: the first ones, those that are counted, and those after them."""
        in_order = sorted(recorded(), key=lambda trace: abs(acceptance(trace) - self.acceptance))
        traces = [with_acceptance(trace, self.acceptance) for trace in in_order]
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
            tokens=CROWD_TOKENS,
            shared_host=self.shared,
            session_slope=self.slope_between,
            draft_slope=DRAFT_SLOPE,
            repeats=self.repeats,
            steps=self.steps,
        )


def places() -> list[Crowd]:
    """Each for all SESSIONS. A GPU's rows cost next to nothing (0.02), a CPU's a good part of a forward (0.15)."""
    return [
        *(Crowd(1.0, 0.9, 0.02, shared=True), Crowd(3.0, 0.6, 0.15, shared=True, slope_between=0.2)),
        *(Crowd(8.0, 0.8, 0.02, shared=True), Crowd(3.0, 0.4, 0.15, shared=True, slope_between=0.2)),
        *(Crowd(3.0, 0.8, 0.15, shared=True, slope_between=0.2), Crowd(1.0, 0.9, 0.15, shared=True, slope_between=0.2)),
        *(
            Crowd(3.0, 0.6, 0.02, shared=True, slope_between=0.02),
            Crowd(8.0, 0.6, 0.15, shared=True, slope_between=0.2),
        ),
        *(Crowd(3.0, 0.6, 0.15, slope_between=0.2), Crowd(8.0, 0.8, 0.02, rtt_ms=20.0, slope_between=0.02)),
        *(Crowd(3.0, 0.4, 0.15, rtt_ms=50.0, slope_between=0.2), Crowd(1.0, 0.8, 0.05, slope_between=0.05)),
        *(Crowd(3.0, 0.6, 0.02, shared=True, repeats=0.5, slope_between=0.02),),
        *(Crowd(3.0, 0.4, 0.15, shared=True, repeats=0.5, slope_between=0.2),),
        *(Crowd(3.0, 0.6, 0.02, rtt_ms=20.0, repeats=0.5, slope_between=0.02),),
        *(real(V_ms, share, steps) for V_ms in (16.0, 70.0) for share in (0.1, 0.25) for steps in (FLAT, STEPS)),
    ]


def real(V_ms: float, share: float, steps: tuple[float, ...]) -> Crowd:
    """A model that people run, and a drafter on its cores that takes so great a share of V(1) for a token."""
    return Crowd(share * V_ms, 0.6, 0.0, shared=True, V_ms=V_ms, steps=steps)


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


@dataclass(frozen=True, slots=True)
class Swept:
    """Tokens per second over all traces; `setting`: the best fixed one."""

    name: str
    setting: str
    best: float
    default: float

    @property
    def share(self) -> float:
        return self.default / self.best


def sweep(cell: WanCell | Crowd, traces: int, tokens: int) -> Swept:
    """Simulate every setting of a cell, and the default. traces, tokens: of a cell of the grid."""
    if isinstance(cell, Crowd):
        return Swept(cell.name, *best_fixed(cell), speed(cell))
    sessions = sessions_of(cell, traces, tokens)
    optimum = sim.optimum_over(sessions, branching=True)
    return Swept(cell.name, optimum.policy.name, optimum.tokens_per_second, experienced(sessions))


def sessions_of(cell: WanCell, traces: int, tokens: int) -> list[sim.Cell]:
    """A session a trace, those whose acceptance is nearest to the cell's first: the least is turned in them."""
    turned = nearest(GREEDY, cell.acceptance)[:traces]
    return [as_simulated(cell, Software(), tokens, trace) for trace in turned]


def experienced(sessions: Sequence[sim.Cell]) -> float:
    """The default's speed over sessions that follow each other, and a first one from which it learns."""
    results = [sim.simulate(sessions[-1])]
    for cell in sessions:
        results.append(sim.simulate(cell, learnt=results[-1].learnt))
    _, *counted = results
    return sum(one.tokens for one in counted) / sum(one.elapsed_us for one in counted) * 1e6


def sweep_all(cells: Sequence[WanCell | Crowd], traces: int, tokens: int) -> list[Swept]:
    found = []
    work = partial(sweep, traces=traces, tokens=tokens)
    for swept in tracked(in_processes(work, cells), len(cells), "cells"):
        found.append(swept)
        if len(found) % SAY_EVERY == 0:
            say(f"bench: {len(found)} of {len(cells)} cells")
    return found


def bar(found: Sequence[Swept]) -> Bar:
    """The cell in which the planner is furthest behind; there is no chance in virtual time."""
    worst = min(found, key=lambda one: one.share)
    share = Estimate(worst.share, worst.share, worst.share, 1.0)
    return at_least(
        f"virtual time, {len(found)} cells, worst {worst.name}: default / best fixed setting", share, NEEDED
    )


def report(found: Sequence[Swept]) -> str:
    worst = sorted(found, key=lambda one: one.share)[:WORST]
    rows = [(one.name, one.setting, f"{one.best:.1f}", f"{one.default:.1f}", f"{one.share:.3f}") for one in worst]
    shares = [one.share for one in found]
    said = (
        f"median {statistics.median(shares):.3f}; at least {NEEDED}: {sum(s >= NEEDED for s in shares)} of {len(found)}"
    )
    head = ("cell, the worst first", "best fixed setting", "tokens/s", "default", "default / best")
    return "\n".join([*table(head, rows), "", said, "", *bar_lines([bar(found)])])


def main(argv: Sequence[str] | None = None) -> int:
    line = argparse.ArgumentParser(prog="python -m bench.sweep", description=__doc__.partition("\n")[0])
    line.add_argument("--rtts", nargs="+", type=float, metavar="MS", help="of the grid, cells of these round trips")
    line.add_argument("--sessions", nargs="+", type=int, metavar="N", help="of the crowds, those of so many sessions")
    line.add_argument("--traces", type=int, default=TRACES, metavar="N", help=f"sessions a setting (default: {TRACES})")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    args = line.parse_args(argv)
    cells: list[WanCell | Crowd] = []
    if args.sessions is None:
        cells += [cell for cell in grid() if args.rtts is None or cell.rtt_ms in args.rtts]
    if args.rtts is None:
        cells += [crowd for crowd in crowds() if args.sessions is None or crowd.sessions in args.sessions]
    if not cells or not 1 <= args.traces <= len(recorded()):
        say(f"bench: error: there are no such cells, or not 1 to {len(recorded())} traces")
        return 2
    began = time.monotonic()
    found = sweep_all(cells, args.traces, TOKENS)
    told = {
        "bars": [asdict(bar(found))],
        "cells": [{**asdict(one), "share": one.share} for one in found],
        "seconds": round(time.monotonic() - began),
    }
    save(args.out, told, {"traces": args.traces, "tokens": TOKENS})
    print(report(found))
    return 0 if bar(found).holds else 1


if __name__ == "__main__":
    sys.exit(main())
