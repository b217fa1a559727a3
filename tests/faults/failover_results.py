"""What was measured of the failover matrix, what was needed, and their forms for people and on disk."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from bench.harness.interval import Estimate
from bench.harness.report import Bar, at_most, table
from tests.faults.cells import STOPPED_S, Cell
from tests.faults.streams import LIMIT_S

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
            at_most("plays that failed, or whose text differed", _just(wrong), 0),
            at_most("longest wait undisturbed, s: else a step more is not to be seen", _just(usual), 2 * self.step_s),
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


def _just(value: float) -> Estimate:
    return Estimate(value, value, value, 1.0)


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
