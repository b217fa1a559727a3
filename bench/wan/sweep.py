"""The controller against the best fixed setting of every cell of the grid, in virtual time: python -m bench.wan.sweep.

A cell is a place and an acceptance; which tokens are guessed right is chance. A setting that happens to suit one trace
is not the cell's best, so a setting's speed is that over several recorded traces, each a session of its own, and the
controller has to come up to the best of all settings over the same sessions, with branches or without. It gets no
settings: each of its sessions starts from what the one before has learnt, as behind an orchestrator, and a session
before the first is not counted. The grid is one session with a drafter of its own; several sessions, shared hosts and
n-grams are `bench.wan.crowds`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench import machine
from bench.bars import Bar, at_least
from bench.interval import Estimate
from bench.report import bar_lines, table
from bench.wan.cells import TOKENS, Cell, grid
from bench.wan.crowds import Crowd, best_fixed, crowds, speed
from bench.wan.traces import GREEDY, nearest, recorded
from bench.wan.virtual import Software, as_simulated, spread
from specwire import sim
from specwire.rpc.process import say

OUT = Path(__file__).resolve().parents[1] / "results" / "sweep.json"
NEEDED = 0.95
# A setting with branches takes seconds to simulate: more traces would be more than half an hour on two cores.
TRACES = 3
WORST = 12
SAY_EVERY = 36


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


def sweep(cell: Cell | Crowd, traces: int, tokens: int) -> Swept:
    """Simulate every setting of a cell, and the default. traces, tokens: of a cell of the grid."""
    if isinstance(cell, Crowd):
        return Swept(cell.name, *best_fixed(cell), speed(cell))
    sessions = sessions_of(cell, traces, tokens)
    best = sim.optimum_over(sessions, branching=True)
    return Swept(cell.name, best.policy.name, best.tokens_per_second, experienced(sessions))


def sessions_of(cell: Cell, traces: int, tokens: int) -> list[sim.Cell]:
    """A session a trace, those whose acceptance is nearest to the cell's first: the least is turned in them."""
    turned = nearest(GREEDY, cell.acceptance)[:traces]
    return [as_simulated(cell, Software(), tokens, trace) for trace in turned]


def experienced(sessions: Sequence[sim.Cell]) -> float:
    """The default's speed over sessions that follow each other, and a first one from which it learns."""
    planner = sim.simulate(sessions[-1]).planner
    results = []
    for cell in sessions:
        results.append(sim.simulate(cell, planner=planner.successor(cell.cost.measured(), cell.shared_host)))
        planner = results[-1].planner
    return sum(one.tokens for one in results) / sum(one.elapsed_us for one in results) * 1e6


def sweep_all(cells: Sequence[Cell | Crowd], traces: int, tokens: int) -> list[Swept]:
    found = []
    for swept in spread(partial(sweep, traces=traces, tokens=tokens), cells, "cells"):
        found.append(swept)
        if len(found) % SAY_EVERY == 0:
            say(f"bench: {len(found)} of {len(cells)} cells")
    return found


def bar(found: Sequence[Swept]) -> Bar:
    """The cell in which the controller is furthest behind; there is no chance in virtual time."""
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
    line = argparse.ArgumentParser(prog="python -m bench.wan.sweep", description=__doc__.partition("\n")[0])
    line.add_argument("--rtts", nargs="+", type=float, metavar="MS", help="of the grid, cells of these round trips")
    line.add_argument("--sessions", nargs="+", type=int, metavar="N", help="of the crowds, those of so many sessions")
    line.add_argument("--traces", type=int, default=TRACES, metavar="N", help=f"sessions a setting (default: {TRACES})")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    args = line.parse_args(argv)
    cells: list[Cell | Crowd] = []
    if args.sessions is None:
        cells += [cell for cell in grid() if args.rtts is None or cell.rtt_ms in args.rtts]
    if args.rtts is None:
        cells += [crowd for crowd in crowds() if args.sessions is None or crowd.sessions in args.sessions]
    if not cells or not 1 <= args.traces <= len(recorded()):
        say(f"bench: error: there are no such cells, or not 1 to {len(recorded())} traces")
        return 2
    began = time.monotonic()
    found = sweep_all(cells, args.traces, TOKENS)
    args.out.write_text(
        json.dumps(
            {
                "name": "sweep",
                "bars": [asdict(bar(found))],
                "cells": [{**asdict(one), "share": one.share} for one in found],
                "traces": args.traces,
                "tokens": TOKENS,
                "seconds": round(time.monotonic() - began),
                "machine": machine.describe(),
                "commit": machine.commit(),
            },
            indent=1,
        )
        + "\n"
    )
    print(report(found))
    return 0 if bar(found).holds else 1


if __name__ == "__main__":
    sys.exit(main())
