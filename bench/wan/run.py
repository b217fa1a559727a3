"""Measure speculation over a line: python -m bench.wan.run --help."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from bench.harness import RESULTS
from bench.harness.entry import run
from bench.wan.cells import NAMED, SHOWN, TOKENS, WanCell, chosen, grid
from bench.wan.disciplines import DEFAULT, PLAIN, tokens_per_second
from bench.wan.emulated import LANES, EmulatedTimes, expected_seconds, measure_cells, measure_software, parted
from bench.wan.report import WanResults, write
from bench.wan.virtual import expect_all
from bench.wan.wire import RULES, measure_wire
from scripts.figures.wan import wan_table
from specwire.core.invalid import InvalidParameter
from specwire.rpc.process import say

OUT = RESULTS / "wan.json"
QUICK_TOKENS, QUICK_REPEATS = 32, 1
# One that also has trees, and one that weighs draft tokens.
QUICK_RULES = ("greedy", "rejection")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WanSettings:
    """What to measure. `cells` over real sockets; `repeats` below 6 leave intervals without 95 % coverage.

    wire: rules whose bytes are counted.
    """

    cells: tuple[WanCell, ...] = NAMED
    tokens: int = TOKENS
    repeats: int = 7
    wire: tuple[str, ...] = tuple(RULES)
    whole_grid: bool = True

    def __post_init__(self) -> None:
        for name, value, most in (("tokens", self.tokens, 1024), ("repeats", self.repeats, 64)):
            if not 1 <= value <= most:
                raise InvalidParameter(name, f"must be from 1 to {most}, not {value}")

    def shown(self) -> dict[str, object]:
        return {**asdict(self), "cells": [cell.name for cell in self.cells]}


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(
        prog="python -m bench.wan.run",
        description="Measure plain decoding, textbook speculation, streaming and the default over an emulated line.",
        epilog="Exit code 1: it could not be measured, or a text depended on the discipline.",
    )
    line.add_argument("--cells", nargs="+", default=[], metavar="NAME", help="these emulated cells only, by name")
    line.add_argument("--no-grid", action="store_true", help="simulate the measured cells only, not the whole grid")
    line.add_argument("--tokens", type=int, metavar="N", help=f"of each session (default: {TOKENS})")
    line.add_argument("--repeats", type=int, metavar="N", help="of each discipline (default: 7)")
    line.add_argument("--quick", action="store_true", help="one cell, short sessions, no grid")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON")
    return line


def settings_of(args: argparse.Namespace) -> WanSettings:
    """Raises ValueError that names what is wrong."""
    names = args.cells or ([SHOWN.name] if args.quick else [])
    return WanSettings(
        cells=chosen(names),
        tokens=args.tokens if args.tokens is not None else QUICK_TOKENS if args.quick else TOKENS,
        repeats=args.repeats if args.repeats is not None else QUICK_REPEATS if args.quick else 7,
        wire=QUICK_RULES if args.quick else tuple(RULES),
        whole_grid=not (args.quick or args.no_grid),
    )


def measure(settings: WanSettings) -> WanResults:
    """All parts in turn, so that none disturbs another."""
    software = _part("what software adds", measure_software)
    expected = _part("the cells in virtual time", lambda: expect_all(settings.cells, software, settings.tokens))
    seconds = sum(
        expected_seconds(one, settings.repeats, settings.tokens) / lanes
        for lanes, some in parted(expected)
        for one in some
    )
    say(f"bench: {len(expected)} cells over real sockets, about {seconds / 60:.0f} minutes")
    cells = measure_cells(expected, settings.repeats, settings.tokens, _say_cell)
    wire = _part("bytes on the wire", lambda: measure_wire(settings.tokens, settings.wire))
    everything = list(grid()) if settings.whole_grid else list(settings.cells)
    return WanResults(
        arguments=settings.shown(),
        software=software,
        grid=_part(f"{len(everything)} cells in virtual time", lambda: expect_all(everything, tokens=settings.tokens)),
        cells=cells,
        wire=wire,
        notes=[
            f"emulated: forwards are sleeps, which need no cores, so {LANES} far cells ran at a time, near ones alone; "
            "a trace says nothing of n-grams, so nothing proposed any. A session's first forward is V(1)."
        ],
    )


def _part(name: str, run: Callable[[], T]) -> T:
    began = time.monotonic()
    found = run()
    say(f"bench: {name}: done in {time.monotonic() - began:.0f} s")
    return found


def _say_cell(one: EmulatedTimes) -> None:
    plain, default = (tokens_per_second(one.samples, name).value for name in (PLAIN, DEFAULT))
    say(f"bench: {one.cell.name}: plain {plain:.1f} tokens/s, default {default:.1f}")


def main(argv: Sequence[str] | None = None) -> int:
    return run(parser().parse_args(argv), settings_of, measure, tell)


def tell(found: WanResults, out: Path) -> bool:
    print("\n\n".join([wan_table(write(found, out)), *found.notes]))
    return found.texts_hold


if __name__ == "__main__":
    # Threads of numeric libraries in this process would only stand in the way of those that are measured.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
