"""What trees gain over chains in every measured cell, in virtual time: python -m bench.branching.run.

Run it before anything is measured over sockets: `bench.wan.judged` holds a measurement against what is written here. A
cell has the trace with which it is measured; beside it are the gains over several traces, greedy and under coupled
noise, and by the most tokens that a forward of the drafter may extend.

Its second table is what a placement is chosen by: for each drafter, from and to which round trip the default is as fast
as textbook speculation with the same drafter in the verifier's box. A drafter that is quick may be too near, too: there
textbook speculation is at its best.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path

from bench.harness import RESULTS, machine
from bench.harness.interleave import tracked
from bench.harness.processes import in_processes
from bench.harness.report import table
from bench.wan.cells import ACCEPTANCES, DRAFTS_MS, LIGHT, NAMED, RTTS_MS, TOKENS, WanCell, chosen
from bench.wan.disciplines import DEFAULT, TEXTBOOK
from bench.wan.traces import COUPLED, GREEDY, nearest
from bench.wan.virtual import ExpectedCell, Software, as_simulated
from specwire import sim
from specwire.core.policy.controller import Controller
from specwire.core.policy.tunables import MOST_BRANCHES
from specwire.rpc.process import say

OUT = RESULTS / "branching.json"
WIDTHS = (2, 4, 8)
TRACES = 4


@dataclass(frozen=True, slots=True)
class BranchingGain:
    """A cell's tokens per second of a second session, and default / chain.

    default: a forward of the drafter extends at most MOST_BRANCHES tokens. by_width: the gain where it extends fewer.
    over_traces: the gain by rule, over several traces. extended: tokens that a forward extended, on average.
    """

    name: str
    chain: float
    default: float
    by_width: dict[int, float]
    over_traces: dict[str, float]
    extended: float

    @property
    def gain(self) -> float:
        return self.default / self.chain


@dataclass(frozen=True, slots=True)
class BranchingPlacement:
    """A drafter's tokens per second in the verifier's box, and those of the default by round trip in ms."""

    draft_ms: float
    acceptance: float
    textbook: float
    by_rtt: dict[float, float]

    def as_fast(self, home: float) -> list[tuple[float, float]]:
        """Round trips from and to which the default is as fast as `home`; straight lines between those simulated."""
        ranges: list[tuple[float, float]] = []
        for near, far in pairwise(sorted(self.by_rtt)):
            first, second = self.by_rtt[near], self.by_rtt[far]
            if max(first, second) < home:
                continue
            crossing = near + (far - near) * (first - home) / (first - second) if min(first, second) < home else far
            begins, ends = (near, crossing) if first >= home else (crossing, far)
            if ranges and ranges[-1][1] == begins:
                begins = ranges.pop()[0]
            ranges.append((begins, ends))
        return ranges


def gain(cell: WanCell, tokens: int = TOKENS, traces: int = TRACES) -> BranchingGain:
    """Simulate a cell, without any software."""
    session = as_simulated(cell, Software(), tokens)
    chain, default = second_session(session, 1), second_session(session)
    rules = (GREEDY, COUPLED) if traces else ()
    return BranchingGain(
        cell.name,
        chain.tokens_per_second,
        default.tokens_per_second,
        {width: second_session(session, width).tokens_per_second / chain.tokens_per_second for width in WIDTHS},
        {rule: _over_traces(cell, rule, tokens, traces) for rule in rules},
        default.extended,
    )


def second_session(cell: sim.Cell, width: int = MOST_BRANCHES) -> sim.Result:
    """The controller's second session: the one from which it learns is not counted. width: most branches."""
    forward = cell.cost.measured()
    first = sim.simulate(cell, planner=Controller(forward, cell.shared_host, width))
    return sim.simulate(cell, planner=first.planner.successor(forward, cell.shared_host))


def _over_traces(cell: WanCell, rule: str, tokens: int, traces: int) -> float:
    sessions = [as_simulated(cell, Software(), tokens, trace) for trace in nearest(rule, cell.acceptance)[:traces]]
    seconds = {width: sum(second_session(one, width).elapsed_us for one in sessions) for width in (1, MOST_BRANCHES)}
    return seconds[1] / seconds[MOST_BRANCHES]


def placement(drafter: tuple[float, float], tokens: int = TOKENS) -> BranchingPlacement:
    """Simulate a drafter, (ms a forward, acceptance), at every round trip; V does not grow with the window."""
    draft_ms, wanted = drafter
    home = as_simulated(WanCell(0.0, draft_ms, wanted, 0.0), Software(), tokens)
    cells = {rtt_ms: as_simulated(WanCell(rtt_ms, draft_ms, wanted, 0.0), Software(), tokens) for rtt_ms in RTTS_MS}
    by_rtt = {rtt_ms: second_session(cell).tokens_per_second for rtt_ms, cell in cells.items()}
    return BranchingPlacement(draft_ms, wanted, sim.best_textbook(home).result.tokens_per_second, by_rtt)


def placements(grid: Sequence[ExpectedCell]) -> list[BranchingPlacement]:
    """The same of cells that are simulated already, those in which V does not grow with the window."""
    found: dict[tuple[float, float], dict[float, ExpectedCell]] = {}
    for one in grid:
        if one.cell.slope == 0.0 and one.cell.row_cost == LIGHT:
            found.setdefault((one.cell.draft_ms, one.cell.acceptance), {})[one.cell.rtt_ms] = one
    return [
        BranchingPlacement(
            *key, by_rtt[0.0].speeds[TEXTBOOK], {rtt: one.speeds[DEFAULT] for rtt, one in by_rtt.items()}
        )
        for key, by_rtt in found.items()
        if set(by_rtt) == set(RTTS_MS)
    ]


def written_gains(path: Path = OUT) -> dict[str, float]:
    """By cell, what was written; nothing where nothing was."""
    return {one["name"]: one["gain"] for one in json.loads(path.read_text())["cells"]} if path.exists() else {}


def report(gains: Sequence[BranchingGain], placements: Sequence[BranchingPlacement]) -> str:
    head = ("in virtual time; tokens/s", "chain", "default", "gain", *(f"W <= {width}" for width in WIDTHS))
    rows = [
        (
            one.name,
            f"{one.chain:.1f}",
            f"{one.default:.1f}",
            f"{one.gain:.2f}",
            *(f"{one.by_width[width]:.2f}" for width in WIDTHS),
            *(f"{found:.2f}" for found in one.over_traces.values()),
            f"{one.extended:.1f}",
        )
        for one in gains
    ]
    first = table((*head, *(f"more traces, {rule}" for rule in gains[0].over_traces), "tokens a forward"), rows)
    return "\n".join([*first, *(["", *placement_lines(placements)] if placements else [])])


def placement_lines(placements: Sequence[BranchingPlacement]) -> list[str]:
    """What a placement is chosen by."""
    head = ("a drafter, in virtual time", "textbook at 0 ms", *(f"{rtt:g} ms" for rtt in RTTS_MS), "as fast at")
    rows = [
        (
            f"d {one.draft_ms:g} ms, a {one.acceptance:g}",
            f"{one.textbook:.1f}",
            *(f"{one.by_rtt[rtt]:.1f}" for rtt in RTTS_MS),
            reach(one.as_fast(one.textbook)),
        )
        for one in placements
    ]
    return [*table(head, rows), "as fast at: the default that far away beside textbook speculation in the box"]


def reach(ranges: Sequence[tuple[float, float]]) -> str:
    return ", ".join(f"{begins:.0f} to {ends:.0f} ms" for begins, ends in ranges) or "nowhere"


def write(gains: Sequence[BranchingGain], placements: Sequence[BranchingPlacement], traces: int, path: Path) -> None:
    record = {
        "name": "branching",
        "bars": [],
        "cells": [{**asdict(one), "gain": one.gain} for one in gains],
        "placements": [{**asdict(one), "as_fast_ms": one.as_fast(one.textbook)} for one in placements],
        "traces": traces,
        "tokens": TOKENS,
        "machine": machine.describe(),
        "commit": machine.commit(),
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    line = argparse.ArgumentParser(prog="python -m bench.branching.run", description=__doc__.partition("\n")[0])
    line.add_argument("--cells", nargs="+", default=[], metavar="NAME", help="these only, by name; nothing is written")
    line.add_argument("--traces", type=int, default=TRACES, metavar="N", help=f"beside the cell's (default: {TRACES})")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    args = line.parse_args(argv)
    try:
        cells = chosen(args.cells)
    except ValueError as error:
        say(f"bench: error: {error}")
        return 2
    drafters = [] if args.cells else list(product(DRAFTS_MS, ACCEPTANCES))
    gains = list(tracked(in_processes(partial(gain, traces=args.traces), cells), len(cells), "cells"))
    placements = list(tracked(in_processes(placement, drafters), len(drafters), "drafters"))
    if cells == NAMED:
        write(gains, placements, args.traces, args.out)
    print(report(gains, placements))
    return 0


if __name__ == "__main__":
    sys.exit(main())
