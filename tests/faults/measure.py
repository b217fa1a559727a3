"""Measures how long text pauses in every cell of the failover matrix: python -m tests.faults.measure --help.

The cells take turns, so that a change of the machine's load meets all of them. A text that is not the target's ends the
measurement. Exit code 1: so it did, or a pause was longer than its bound.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench import machine
from bench.bars import at_most
from bench.interval import Estimate
from bench.report import table
from specwire.rpc.process import say
from tests.faults.matrix import CELLS, Cell
from tests.faults.parts import ROOT
from tests.faults.place import Place, place
from tests.faults.scene import DRAFT, TARGET, Scene

OUT = ROOT / "bench" / "results" / "failover.json"
REPEATS = 5
# Nothing happens: the longest wait between two chunks as it is.
UNDISTURBED = Cell("nobody", "none", "", "", "", 0.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    asked = parser().parse_args(arguments)
    cells = [cell for cell in CELLS if asked.only in cell.name]
    if not cells or asked.repeats < 1:
        parser().error(f"nothing to measure: --only {asked.only!r}, --repeats {asked.repeats}")
    before = machine.describe()
    with place(TARGET, DRAFT) as running:
        pauses = measure(running, [UNDISTURBED, *cells], asked.repeats)
    undisturbed = statistics.median(pauses.pop(UNDISTURBED))
    bars = [
        at_most(f"longest pause, s: {cell.where}, {cell.fault}", worst(pauses[cell]), cell.bound_s) for cell in cells
    ]
    results = {
        "name": asked.out.stem,
        "bars": [asdict(bar) for bar in bars],
        "cells": [figures(cell, pauses[cell]) for cell in cells],
        "undisturbed_s": round(undisturbed, 4),
        "machine": before,
        "commit": machine.commit(),
        "arguments": {"repeats": asked.repeats, "only": asked.only, "target": TARGET, "draft": DRAFT},
    }
    asked.out.write_text(json.dumps(results, indent=1) + "\n")
    rows = [line(cell, pauses[cell]) for cell in cells]
    print("\n".join(table(["cell", "p50, s", "max, s", "at most, s"], rows)))
    return 0 if all(bar.holds for bar in bars) else 1


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(prog="python -m tests.faults.measure", description="Measure pauses after faults.")
    line.add_argument(
        "--repeats", type=int, default=REPEATS, metavar="N", help="plays of each cell (default: %(default)s)"
    )
    line.add_argument("--only", default="", metavar="TEXT", help="only cells whose name contains it")
    line.add_argument(
        "--out", type=Path, default=OUT, metavar="FILE", help="JSON (default: bench/results/failover.json)"
    )
    return line


def measure(running: Place, cells: Sequence[Cell], repeats: int) -> dict[Cell, list[float]]:
    """Seconds of each cell's longest pause, by play."""
    pauses: dict[Cell, list[float]] = {cell: [] for cell in cells}
    began = time.monotonic()
    for repeat in range(repeats):
        for cell in cells:
            pauses[cell].append(play(running, cell))
            at = f"{time.monotonic() - began:5.0f} s, {repeat + 1} of {repeats}"
            say(f"bench-failover: {at}: {cell.name}: {pauses[cell][-1]:.3f} s")
    return pauses


def play(running: Place, cell: Cell) -> float:
    """The longest pause. Raises AssertionError where a text is not the target's."""
    scene = Scene(running, cell)
    scene.play()
    for stream, expected in zip(scene.streams, scene.expected(), strict=True):
        assert stream.error is None, f"{cell.name}: {stream.error}"
        assert stream.tokens == expected, f"{cell.name}: the text differs"
    return scene.pause


def worst(pauses: Sequence[float]) -> Estimate:
    """What was measured, no more: the interval is the plays' range."""
    return Estimate(statistics.median(pauses), min(pauses), max(pauses), 1.0)


def figures(cell: Cell, pauses: Sequence[float]) -> dict[str, object]:
    return {
        "where": cell.where,
        "fault": cell.fault,
        "p50_s": round(statistics.median(pauses), 4),
        "max_s": round(max(pauses), 4),
        "bound_s": cell.bound_s,
        "raw_s": [round(pause, 4) for pause in pauses],
    }


def line(cell: Cell, pauses: Sequence[float]) -> list[str]:
    return [cell.name, f"{statistics.median(pauses):.2f}", f"{max(pauses):.2f}", f"{cell.bound_s:g}"]


if __name__ == "__main__":
    sys.exit(main())
