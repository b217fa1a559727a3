"""What a measurement of steps found: times, ratios and bars, as a table, a file and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure as Canvas

from bench.harness import machine
from bench.harness.interval import Estimate, estimate
from bench.harness.record import write_object
from bench.harness.report import Bar, at_most, bar_lines, table

# Needed of V(1) as a multiple of the peer's time per token, and of V(8) as a multiple of V(1) in bfloat16.
MOST_OF_PEER = 2.0
MOST_OF_ONE, WINDOW = 1.6, 8


class StepCell(NamedTuple):
    """Steps of so many sessions on a runtime. windows: positions of each, by turns."""

    runtime: str
    sessions: int
    windows: tuple[int, ...]

    @property
    def window(self) -> int:
        """Positions of each session; 0 if that changes from step to step."""
        return self.windows[0] if len(self.windows) == 1 else 0


ONE = (1,)
PEER = StepCell("OpenVINO GenAI", 1, ONE)


@dataclass(frozen=True, slots=True)
class StepSample:
    """One walk over one text in one cell."""

    repeat: int
    text: int
    cell: StepCell
    seconds: float
    steps: int


@dataclass(frozen=True, slots=True)
class StepRow:
    """A cell's line. to_one: as a multiple of the same runtime's V(1); to_peer: of the peer's time per token."""

    cell: StepCell
    ms: Estimate
    to_one: Estimate
    to_peer: Estimate | None


@dataclass(frozen=True, slots=True)
class StepResults:
    """A measurement. notes: what was not measured, and why."""

    arguments: dict[str, object]
    rows: Sequence[StepRow]
    bars: Sequence[Bar]
    samples: Sequence[StepSample]
    notes: Sequence[str]


def find(samples: Sequence[StepSample], arguments: dict[str, object], notes: Sequence[str]) -> StepResults:
    cells = list(dict.fromkeys(sample.cell for sample in samples))
    rows = [_row(samples, cell, PEER in cells) for cell in cells]
    return StepResults(arguments, rows, list(_bars(rows, arguments["dtype"] == "bfloat16")), samples, notes)


def _row(samples: Sequence[StepSample], cell: StepCell, with_peer: bool) -> StepRow:
    one = StepCell(cell.runtime, 1, ONE)
    to_peer = estimate(_ratios(samples, cell, PEER)) if with_peer else None
    times = [1e3 * seconds for seconds in _times(samples, cell)]
    return StepRow(cell, estimate(times), estimate(_ratios(samples, cell, one)), to_peer)


def _times(samples: Sequence[StepSample], cell: StepCell) -> list[float]:
    """Seconds per step of each repeat."""
    of_cell = [sample for sample in samples if sample.cell == cell]
    repeats = sorted({sample.repeat for sample in of_cell})
    return [
        sum(sample.seconds for sample in of_cell if sample.repeat == repeat)
        / sum(sample.steps for sample in of_cell if sample.repeat == repeat)
        for repeat in repeats
    ]


def _ratios(samples: Sequence[StepSample], cell: StepCell, other: StepCell) -> list[float]:
    return [one / two for one, two in zip(_times(samples, cell), _times(samples, other), strict=True)]


def _bars(rows: Sequence[StepRow], bfloat16: bool) -> Iterator[Bar]:
    for row in rows:
        cell = row.cell
        if cell == PEER or cell.sessions > 1:
            continue
        if cell.window == 1 and row.to_peer is not None:
            yield at_most(f"{cell.runtime}, V(1) / OpenVINO GenAI's time per token", row.to_peer, MOST_OF_PEER)
        if cell.window == WINDOW and bfloat16:
            yield at_most(f"{cell.runtime}, V({WINDOW}) / V(1)", row.to_one, MOST_OF_ONE)


def report(found: StepResults) -> str:
    head = ("step", "sessions", "positions of each", "ms", "x its V(1)", "x OpenVINO GenAI's token")
    rows = [
        (
            row.cell.runtime,
            str(row.cell.sessions),
            ", ".join(map(str, row.cell.windows)),
            f"{row.ms:.2f}",
            f"{row.to_one:.2f}",
            "-" if row.to_peer is None else f"{row.to_peer:.2f}",
        )
        for row in found.rows
    ]
    coverage = found.rows[0].ms.coverage
    note = f"medians over repeats; in brackets an interval that covers the true median with {coverage:.1%}"
    bars = ["", *bar_lines(found.bars)] if found.bars else []
    return "\n".join([*table(head, rows), note, *bars, *found.notes])


def write(found: StepResults, path: Path) -> None:
    head = {
        "name": path.stem,
        "bars": [asdict(bar) for bar in found.bars],
        "rows": [{**row.cell._asdict(), **_estimates(row)} for row in found.rows],
        "notes": list(found.notes),
        "machine": machine.describe(),
        "commit": machine.commit(),
        "arguments": found.arguments,
    }
    write_object(head, [_raw(sample) for sample in found.samples], path)


def _estimates(row: StepRow) -> dict[str, object]:
    to_peer = None if row.to_peer is None else asdict(row.to_peer)
    return {"ms": asdict(row.ms), "to_one": asdict(row.to_one), "to_peer": to_peer}


def _raw(sample: StepSample) -> dict[str, object]:
    cell = sample.cell._asdict()
    return {"repeat": sample.repeat, "text": sample.text, **cell, "seconds": sample.seconds, "steps": sample.steps}


def draw(found: StepResults, path: Path) -> None:
    """V(m) of each runtime for one session, and the time of one position each for several."""
    matplotlib.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    canvas = Canvas(figsize=(11, 4.5), layout="constrained")
    windows, sessions = canvas.subplots(1, 2, sharey=True)
    windows.set(title="one session", xlabel="positions of its window", ylabel="ms per step")
    sessions.set(title="several sessions, one position each", xlabel="sessions")
    for runtime in dict.fromkeys(row.cell.runtime for row in found.rows if row.cell != PEER):
        rows = [row for row in found.rows if row.cell.runtime == runtime]
        one = [row for row in rows if row.cell.sessions == 1 and row.cell.window]
        many = [row for row in rows if row.cell.window == 1]
        windows.plot([row.cell.window for row in one], [row.ms.value for row in one], "o-", label=runtime)
        sessions.plot([row.cell.sessions for row in many], [row.ms.value for row in many], "o-", label=runtime)
    for row in found.rows:
        if row.cell == PEER:
            windows.axhline(row.ms.value, color="#9aa5b1", linestyle="--", label="OpenVINO GenAI, a token")
    windows.set_ylim(bottom=0)
    windows.legend(frameon=False)
    canvas.savefig(path, dpi=110)
