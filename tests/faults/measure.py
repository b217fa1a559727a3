"""Measures every cell of the failover matrix: python -m tests.faults.measure --help.

How soon is the fault noticed, and for how long does text pause? Cells for which no text may wait come first, one at a
time with nothing beside them, because a step's difference counts there. The others share the machine in two lanes:
those whose fault is that nobody answers for seconds, which mostly wait, and the rest. All are repeated in turn, so that
a change of the machine's load meets all of them. Exit code 1: a bound was missed, or a text was not the target's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.harness import machine, record
from bench.harness.interval import Estimate
from bench.harness.report import Bar, at_most, exactly, none_of, table
from specwire.progress import ProgressBar
from specwire.rpc.process import say
from tests.faults.matrix import CELLS, HELD_S, STOPPED_S, Cell, Notice, held_s
from tests.faults.parts import ROOT
from tests.faults.place import place
from tests.faults.scene import ASKED, DRAFT, LONG, Manner, Scene
from tests.faults.stack import PLAIN
from tests.faults.streams import LIMIT_S, plain

OUT = ROOT / "bench" / "results" / "failover.json"
REPEATS = 3
# Long enough that a step more is no noise: an emulation of a large target.
STEP_S = 0.05
TARGET = f"scripted:7:vocab=64:delay_ms={1000 * STEP_S:g}"
# Some forty chunks before the fault, whose longest wait is the stream's usual one.
BEGUN = 100
# Nothing happens: the longest wait between two chunks as it is.
UNDISTURBED = Cell("nobody", "none", "", Notice(0.0, ""), "", None)

# ----------------------------------------------------------------------------------------------------------------------
# What was measured, what was needed, and their forms for people and on disk.

# How much one wait differs from another of the same kind on a machine that does other things too: half a step.
NOISE_S = 0.025


@dataclass(frozen=True, slots=True)
class Play:
    """One play of a cell, in seconds.

    pause_s: the longest wait for a chunk behind the fault; usual_s: the longest before it.
    noticed_s: until somebody said that he had noticed, None where nobody did. stopped_s: how long nobody answered,
        where that is the fault.
    """

    pause_s: float
    usual_s: float
    noticed_s: float | None
    stopped_s: float = STOPPED_S


class Measured:
    """Plays of each cell. step_s: what a step of the target takes. Cells may be added to from several threads."""

    def __init__(self, cells: Sequence[Cell], step_s: float) -> None:
        self.cells = list(cells)
        self.step_s = step_s
        self.plays: dict[Cell, list[Play]] = {cell: [] for cell in cells}
        self.failures: list[str] = []
        self.undisturbed: list[Play] = []
        self._adding = threading.Lock()

    def add(self, cell: Cell, play: Play) -> None:
        """Note a play; of a cell that is none of these, one in which nothing happened."""
        with self._adding:
            self.plays.get(cell, self.undisturbed).append(play)

    def fail(self, cell: Cell, error: Exception) -> None:
        with self._adding:
            self.failures.append(f"{cell.name}: {error!r}")

    @property
    def usual_s(self) -> float:
        """The longest wait of a stream to which nothing happens, in the median play of it."""
        return statistics.median([play.pause_s for play in self.undisturbed] or [0.0])

    def bound_s(self, cell: Cell, play: Play) -> float:
        """How long the longest wait of this play may be."""
        if cell.bound_s is None:
            return self.usual_s + self.step_s + NOISE_S
        return cell.bound_s + (play.stopped_s - STOPPED_S if cell.outlasted else 0.0)

    def noticed_s(self, cell: Cell) -> list[float]:
        """Of each play; where nobody noticed what had to be noticed, LIMIT_S."""
        told = [play.noticed_s for play in self.plays[cell]]
        return [LIMIT_S if at is None else at for at in told if at is not None or not cell.over_at_once]

    @property
    def bars(self) -> list[Bar]:
        wrong, usual = len(self.failures), self.usual_s
        return [
            none_of("plays that failed, or whose text differed", wrong),
            at_most("longest wait undisturbed, s: else a step more is not to be seen", exactly(usual), 2 * self.step_s),
            *(bar for cell in self.cells if self.plays[cell] for bar in self.bars_of(cell)),
        ]

    def bars_of(self, cell: Cell) -> Iterator[Bar]:
        of, plays = f"{cell.where}, {cell.fault}", self.plays[cell]
        if cell.bound_s is None:
            beyond = [play.pause_s - self.bound_s(cell, play) + self.step_s + NOISE_S for play in plays]
            yield at_most(f"longest wait beyond the usual one, s: {of}", worst(beyond), self.step_s + NOISE_S)
        else:
            bound = max(self.bound_s(cell, play) for play in plays)
            yield at_most(f"longest wait, s: {of}", worst([play.pause_s for play in plays]), bound)
        if noticed := self.noticed_s(cell):
            yield at_most(f"noticed, s: {of}", worst(noticed), cell.noticed.within_s)

    @property
    def holds(self) -> bool:
        return all(bar.holds for bar in self.bars)


def worst(values: Sequence[float]) -> Estimate:
    """What was measured, no more: the interval is the plays' range."""
    return Estimate(statistics.median(values), min(values), max(values), 1.0)


def results(measured: Measured) -> dict[str, object]:
    """As JSON."""
    return {
        "bars": [asdict(bar) for bar in measured.bars],
        "cells": [figures(measured, cell) for cell in measured.cells if measured.plays[cell]],
        "failures": measured.failures,
        "undisturbed_s": round(measured.usual_s, 4),
        "step_s": measured.step_s,
        "noise_s": NOISE_S,
    }


def figures(measured: Measured, cell: Cell) -> dict[str, object]:
    plays, noticed = measured.plays[cell], measured.noticed_s(cell)
    pauses, bound = [play.pause_s for play in plays], max(measured.bound_s(cell, play) for play in plays)
    return {
        "where": cell.where,
        "fault": cell.fault,
        "p50_s": round(statistics.median(pauses), 4),
        "max_s": round(max(pauses), 4),
        "bound_s": round(bound, 4),
        "noticed_p50_s": round(statistics.median(noticed), 3) if noticed else None,
        "noticed_max_s": round(max(noticed), 3) if noticed else None,
        "within_s": cell.noticed.within_s,
        "holds": all(bar.holds for bar in measured.bars_of(cell)),
        "raw": [asdict(play) for play in plays],
    }


def shown(measured: Measured) -> str:
    """The table, and what was missed."""
    rows = [row(figures(measured, cell)) for cell in measured.cells if measured.plays[cell]]
    head = ["cell", "noticed p50, s", "max, s", "within, s", "pause p50, s", "max, s", "at most, s", ""]
    missed = [
        f"MISSED: {bar.name}: {bar.high:.3f}, needed <= {bar.needed:.3f}" for bar in measured.bars if not bar.holds
    ]
    return "\n".join([*table(head, rows), *missed, *measured.failures])


def row(cell: dict[str, object]) -> list[str]:
    told = [cell[name] for name in ("noticed_p50_s", "noticed_max_s", "within_s", "p50_s", "max_s", "bound_s")]
    figures_of = ["-" if value is None else f"{value:.2f}" for value in told]
    return [f"{cell['where']}, {cell['fault']}", *figures_of, "holds" if cell["holds"] else "MISSED"]


# ----------------------------------------------------------------------------------------------------------------------
# The command.


@dataclass(frozen=True, slots=True)
class Figures:
    """What goes to disk, as JSON. whole: of every cell."""

    found: Mapping[str, object]
    whole: bool

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.found, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    asked = parser().parse_args(arguments)
    cells = [cell for cell in CELLS if asked.only in cell.name]
    if not cells or asked.repeats < 1:
        parser().error(f"nothing to measure: --only {asked.only!r}, --repeats {asked.repeats}")
    record.check(asked.out)
    ran_on, commit = machine.describe(), machine.commit()  # what is measured, whatever is committed meanwhile
    measured = Measured(cells, STEP_S)
    measure(cells, asked.repeats, measured)
    found = {
        "name": OUT.stem,
        **results(measured),
        "machine": ran_on,
        "commit": commit,
        "arguments": {"repeats": asked.repeats, "only": asked.only, "target": TARGET, "draft": DRAFT, "held_s": HELD_S},
    }
    record.keep(Figures(found, not asked.only), asked.out, OUT, say)
    print(shown(measured))
    return 0 if measured.holds else 1


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(
        prog="python -m tests.faults.measure", description="Measure how soon faults are noticed, and pauses."
    )
    line.add_argument(
        "--repeats", type=int, default=REPEATS, metavar="N", help="plays of each cell (default: %(default)s)"
    )
    line.add_argument("--only", default="", metavar="TEXT", help="only cells whose name contains it")
    record.add_argument(line, OUT)
    return line


def measure(cells: Sequence[Cell], repeats: int, measured: Measured) -> None:
    """Play every cell so often; `measured` hears of each play."""
    for one in ASKED:  # now, for it takes a core
        plain(PLAIN, LONG, one.prompt, one.sampling)
    fine = [cell for cell in cells if cell.unseen]
    silent = [cell for cell in cells if cell.silent and cell not in fine]
    others = [cell for cell in cells if cell not in fine and cell not in silent]
    with ExitStack() as owned, ProgressBar("plays", repeats * (len(cells) + 1)) as bar:
        groups = [each for each in (fine + silent or others, silent and others) if each]
        lanes = [owned.enter_context(Lane(measured, bar)) for _ in groups]
        for repeat in range(repeats):
            say(f"bench-failover: {repeat + 1} of {repeats}")
            lanes[0].play([UNDISTURBED, *fine]).result()
            playing = [lanes[0].play(silent), lanes[-1].play(others)]
            for one_lane in playing:
                one_lane.result()


class Lane:
    """Plays cells one after the other, at a place of its own, in a thread of its own: processes end with theirs."""

    def __init__(self, measured: Measured, bar: ProgressBar) -> None:
        self._measured = measured
        self._bar = bar
        self._over = threading.Event()
        self._thread = ThreadPoolExecutor(1)
        self._owned = ExitStack()
        self._place = self._thread.submit(self._owned.enter_context, place(TARGET, DRAFT))

    def play(self, cells: Sequence[Cell]) -> Future[None]:
        return self._thread.submit(self._play, cells)

    def _play(self, cells: Sequence[Cell]) -> None:
        for cell in cells:
            if self._over.is_set():
                return
            began = time.monotonic()
            try:
                found = self._play_one(cell)
            except Exception as error:  # any error: the other cells are still measured
                self._measured.fail(cell, error)
                say(f"bench-failover: {cell.name}: FAILED: {error!r}")
                continue
            finally:
                self._bar.update()
            self._measured.add(cell, found)
            seen = "-" if found.noticed_s is None else f"{found.noticed_s:.2f} s"
            took = time.monotonic() - began
            say(f"bench-failover: {cell.name}: noticed {seen}, pause {found.pause_s:.2f} s (took {took:.0f} s)")

    def _play_one(self, cell: Cell) -> Play:
        """Raises AssertionError where a text is not the target's."""
        running = self._place.result()
        running.mend()
        stopped_s = held_s(cell)
        scene = Scene(running, cell, manner=Manner(length=LONG, begun=BEGUN, left=True, stopped_s=stopped_s))
        scene.play()
        for stream, expected in zip(scene.streams, scene.expected(), strict=True):
            assert stream.error is None, f"{cell.name}: {stream.error}"
            assert stream.tokens == expected, f"{cell.name}: the text differs"
        return Play(scene.pause, scene.usual, scene.noticed, stopped_s)

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.submit(self._owned.close).result()
        self._thread.shutdown()


if __name__ == "__main__":
    sys.exit(main())
