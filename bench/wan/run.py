"""Measure speculation over a line: python -m bench.wan.run --help."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from bench.harness import RESULTS, machine
from bench.harness.entry import run
from bench.relay.gauge import PINGS, gauge
from bench.wan import results
from bench.wan.cells import NAMED, RTTS_MS, SHOWN, TOKENS, WanCell, chosen, grid
from bench.wan.disciplines import DEFAULT, PLAIN, tokens_per_second
from bench.wan.emulated import LANES, EmulatedTimes, expected_seconds, measure_cells, measure_software, parted
from bench.wan.judged import bars
from bench.wan.plot import draw
from bench.wan.real_pair import MeasuredPair, demo_pair, measure_pair
from bench.wan.report import report
from bench.wan.results import Earlier, WanResults, earlier
from bench.wan.virtual import Software, expect_all
from bench.wan.wire import RULES, measure_wire
from specwire.core.invalid import InvalidParameter
from specwire.rpc.process import say

OUT = RESULTS / "wan.json"
QUICK_TOKENS, QUICK_REPEATS = 32, 1
QUICK_RTTS_MS, QUICK_PINGS = (0.0, 20.0), 10
# One that also has trees, and one that weighs draft tokens.
QUICK_RULES = ("greedy", "rejection")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WanSettings:
    """What to measure. `cells` over real sockets; `repeats` below 6 leave intervals without 95 % coverage.

    wire: rules whose bytes are counted. before: whose demo pair stands for one of this run.
    """

    cells: tuple[WanCell, ...] = NAMED
    rtts_ms: tuple[float, ...] = RTTS_MS
    tokens: int = TOKENS
    repeats: int = 7
    pair: bool = True
    wire: tuple[str, ...] = tuple(RULES)
    whole_grid: bool = True
    pings: int = PINGS
    before: Earlier | None = None

    def __post_init__(self) -> None:
        for name, value, most in (("tokens", self.tokens, 1024), ("repeats", self.repeats, 64)):
            if not 1 <= value <= most:
                raise InvalidParameter(name, f"must be from 1 to {most}, not {value}")

    def shown(self) -> dict[str, object]:
        shown = asdict(replace(self, before=None))
        return {
            **shown,
            "cells": [cell.name for cell in self.cells],
            "before": self.before.commit if self.before else None,
        }


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(
        prog="python -m bench.wan.run",
        description="Measure plain decoding, textbook speculation, streaming and the default over an emulated line.",
        epilog="Exit code 1: it could not be measured, or a text depended on the discipline.",
    )
    line.add_argument("--cells", nargs="+", default=[], metavar="NAME", help="these emulated cells only, by name")
    part = line.add_mutually_exclusive_group()
    part.add_argument("--real-only", action="store_true", help="the demo pair only: no emulated devices, no grid")
    part.add_argument("--emulated-only", action="store_true", help="no demo pair")
    part.add_argument("--pair-from", type=Path, metavar="FILE", help="take the demo pair's part of an earlier run")
    line.add_argument("--no-grid", action="store_true", help="simulate the measured cells only, not the whole grid")
    line.add_argument("--tokens", type=int, metavar="N", help=f"of each session (default: {TOKENS})")
    line.add_argument("--repeats", type=int, metavar="N", help="of each discipline (default: 7)")
    line.add_argument("--quick", action="store_true", help="one cell, two round trips, short sessions, no grid")
    line.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON; a PNG beside it")
    return line


def settings_of(args: argparse.Namespace) -> WanSettings:
    """Raises ValueError that names what is wrong."""
    names = args.cells or ([SHOWN.name] if args.quick else [])
    return WanSettings(
        cells=() if args.real_only else chosen(names),
        rtts_ms=QUICK_RTTS_MS if args.quick else RTTS_MS,
        tokens=args.tokens if args.tokens is not None else QUICK_TOKENS if args.quick else TOKENS,
        repeats=args.repeats if args.repeats is not None else QUICK_REPEATS if args.quick else 7,
        pair=not (args.emulated_only or args.pair_from),
        wire=() if args.real_only else QUICK_RULES if args.quick else tuple(RULES),
        whole_grid=not (args.quick or args.real_only or args.no_grid),
        pings=QUICK_PINGS if args.quick else PINGS,
        before=earlier(args.pair_from) if args.pair_from else None,
    )


def measure(settings: WanSettings) -> WanResults:
    """All parts in turn, so that none disturbs another."""
    relay = _part("the relay itself", lambda: gauge(pings=settings.pings))
    software = _part("what software adds", measure_software) if settings.cells else Software()
    expected = _part("the cells in virtual time", lambda: expect_all(settings.cells, software, settings.tokens))
    if expected:
        seconds = sum(
            expected_seconds(one, settings.repeats, settings.tokens) / lanes
            for lanes, some in parted(expected)
            for one in some
        )
        say(f"bench: {len(expected)} cells over real sockets, about {seconds / 60:.0f} minutes")
    cells = measure_cells(expected, settings.repeats, settings.tokens, _say_cell) if expected else []
    pair = measure_pair(settings.rtts_ms, settings.repeats, settings.tokens, _say_pair) if settings.pair else []
    if settings.before is not None:
        pair = list(settings.before.pair)
    wire = _part("bytes on the wire", lambda: measure_wire(settings.tokens, settings.wire)) if settings.wire else []
    everything = list(grid()) if settings.whole_grid else list(settings.cells)
    return WanResults(
        arguments=settings.shown(),
        machine=machine.describe(),
        commit=machine.commit(),
        gauge=relay,
        software=software,
        grid=_part(f"{len(everything)} cells in virtual time", lambda: expect_all(everything, tokens=settings.tokens)),
        cells=cells,
        pair=pair,
        wire=wire,
        bars=bars(cells, pair, wire),
        notes=notes(cells, pair, settings.before),
        pair_commit=settings.before.commit if settings.before is not None else None,
    )


def notes(cells: Sequence[EmulatedTimes], pair: Sequence[MeasuredPair], before: Earlier | None = None) -> list[str]:
    said = []
    if not all([*(one.isolated for one in cells), *(one.isolated for one in pair)]):
        said.append("edge and cloud shared one network namespace: this system allowed no others")
    if cells:
        said.append(
            f"emulated: forwards are sleeps, which need no cores, so {LANES} far cells ran at a time, near ones alone; "
            "the verifier's n-gram proposals were off: a trace says nothing of them. A session's first forward is V(1)."
        )
    if pair:
        shared = "orchestrator, verifier, relays and client shared the cores of one machine"
        own = ", but for one that the drafter had to itself" if demo_pair().apart else ", with the drafter"
        said.append(f"demo pair: {shared}{own}.")
    if before is not None:
        said.append(f"demo pair: measured in a run of its own, of commit {before.commit[:7]}.")
    return said


def _part(name: str, run: Callable[[], T]) -> T:
    began = time.monotonic()
    found = run()
    say(f"bench: {name}: done in {time.monotonic() - began:.0f} s")
    return found


def _say_cell(one: EmulatedTimes) -> None:
    plain, default = (tokens_per_second(one.samples, name).value for name in (PLAIN, DEFAULT))
    say(f"bench: {one.cell.name}: plain {plain:.1f} tokens/s, default {default:.1f}")


def _say_pair(one: MeasuredPair) -> None:
    plain, default = (tokens_per_second(one.samples, name).value for name in (PLAIN, DEFAULT))
    say(f"bench: demo pair at {one.rtt_ms:g} ms: plain {plain:.1f} tokens/s, default {default:.1f}")


def main(argv: Sequence[str] | None = None) -> int:
    return run(parser().parse_args(argv), settings_of, measure, tell)


def tell(found: WanResults, out: Path) -> bool:
    results.write(found, out)
    draw(found, out.with_suffix(".png"))
    print(report(found))
    return found.texts_hold


if __name__ == "__main__":
    # Threads of numeric libraries in this process would only stand in the way of those that are measured.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
