"""The picture beside the table: speed and pauses against the number of sessions at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from bench.batch.figures import BatchLine
from bench.batch.rows import (
    AUTOMATIC,
    CONTINUOUS,
    HEADED,
    LABELS,
    OFF,
    ON,
    PADDED,
    SAMPLED,
    SAMPLED_HEADED,
    SAMPLED_OFF,
)

COLOURS = {
    OFF: "#7fb3d5",
    ON: "#c9a227",
    AUTOMATIC: "#1f6fb2",
    HEADED: "#123f66",
    SAMPLED_OFF: "#a9cfa4",
    SAMPLED: "#3b8132",
    SAMPLED_HEADED: "#1d4d18",
    PADDED: "#9aa5b1",
    CONTINUOUS: "#627282",
}


def draw(lines: Sequence[BatchLine], path: Path) -> None:
    matplotlib.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    canvas = Canvas(figsize=(13, 5), layout="constrained")
    speeds, pauses = canvas.subplots(1, 2)
    levels = sorted({line.level for line in lines})
    for axes, title in (
        (speeds, "tokens per second, all sessions together"),
        (pauses, "ms between tokens, p50 and (dashed) p95"),
    ):
        axes.set(title=title, xlabel="sessions at once", xscale="log")
        axes.set_xticks(levels, [str(level) for level in levels])
        axes.minorticks_off()
    for row in dict.fromkeys(line.row for line in lines):
        own = [line for line in lines if line.row == row]
        _speed(speeds, own)
        _pauses(pauses, own)
    speeds.set_ylim(bottom=0)
    pauses.set_ylim(bottom=0)
    speeds.legend(frameon=False)
    canvas.savefig(path, dpi=110)


def _speed(axes: Axes, lines: Sequence[BatchLine]) -> None:
    levels, speeds = [line.level for line in lines], [line.tokens_per_second for line in lines]
    colour, label = COLOURS[lines[0].row], LABELS[lines[0].row]
    axes.plot(levels, [speed.value for speed in speeds], "o-", color=colour, label=label)
    axes.fill_between(levels, [each.low for each in speeds], [each.high for each in speeds], color=colour, alpha=0.15)


def _pauses(axes: Axes, lines: Sequence[BatchLine]) -> None:
    levels, colour = [line.level for line in lines], COLOURS[lines[0].row]
    axes.plot(levels, [line.pause_p50_ms for line in lines], "o-", color=colour)
    axes.plot(levels, [line.pause_p95_ms for line in lines], "o--", color=colour)
