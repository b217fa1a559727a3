"""Measures every cell of the failover matrix: python -m tests.faults.measure --help.

How soon is the fault noticed, and for how long does text pause? Cells for which no text may wait come first, one at a
time with nothing beside them, because a step's difference counts there. The others share the machine in two lanes:
those whose fault is that nobody answers for seconds, which mostly wait, and the rest. All are repeated in turn, so that
a change of the machine's load meets all of them. Exit code 1: a bound was missed, or a text was not the target's.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.harness import machine, record
from specwire.progress import ProgressBar
from specwire.rpc.process import say
from tests.faults.cells import HELD_S, Cell, Notice, held_s
from tests.faults.failover_results import Measured, Play, results, shown
from tests.faults.matrix import CELLS
from tests.faults.parts import ROOT
from tests.faults.place import place
from tests.faults.scene import ASKED, DRAFT, LONG, Manner, Scene
from tests.faults.stack import PLAIN
from tests.faults.streams import plain

OUT = ROOT / "bench" / "results" / "failover.json"
REPEATS = 3
# Long enough that a step more is no noise: an emulation of a large target.
STEP_S = 0.05
TARGET = f"scripted:7:vocab=64:delay_ms={1000 * STEP_S:g}"
# Some forty chunks before the fault, whose longest wait is the stream's usual one.
BEGUN = 100
# Nothing happens: the longest wait between two chunks as it is.
UNDISTURBED = Cell("nobody", "none", "", Notice(0.0, ""), "", None)


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
