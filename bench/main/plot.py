"""The picture beside the table: speeds, ratios prompt by prompt, and where the time beside the forwards goes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.harness.rows import (
    ASSISTED,
    DRAFTING_OFF,
    DRAFTING_ON,
    ONE_OFF,
    ONE_ON,
    PLAIN,
    SEVERAL_OFF,
    SEVERAL_ON,
    WITH_HEAD,
)
from bench.harness.runs import Sample, prompt_ratios, repeat_speeds
from bench.main.gaps import Figure
from bench.main.judged import GAPS_MS, speed_bars
from bench.main.results import Results, RowResult

COLOURS = {PLAIN: "#9aa5b1", ASSISTED: "#627282", DRAFTING_OFF: "#7fb3d5", DRAFTING_ON: "#1f6fb2", WITH_HEAD: "#123f66"}
COLOURS |= {SEVERAL_OFF: "#7fb3d5", SEVERAL_ON: "#1f6fb2", ONE_OFF: "#7fb3d5", ONE_ON: "#1f6fb2"}
EXTRA_COLOUR = "#c9a227"
PARTS = {
    "choosing tokens": "#8e6fb0",
    "deciding, scheduling": "#c7b5dc",
    "verifier, gRPC": "#1f6fb2",
    "log": "#c0603a",
    "orchestrator": "#c9a227",
    "gRPC, client": "#7fb3d5",
}
NEEDED = "#b03a2e"


def draw(results: Results, path: Path) -> None:
    matplotlib.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    canvas = Canvas(figsize=(17, 5), layout="constrained")
    speeds, ratios, gaps = canvas.subplots(1, 3, width_ratios=(1.1, 0.9, 1.2))
    _speeds(speeds, results.rows, results.samples)
    _ratios(ratios, results.samples)
    _gaps(gaps, results.figures)
    canvas.savefig(path, dpi=110)


def _speeds(axes: Axes, rows: Sequence[RowResult], samples: Sequence[Sample]) -> None:
    axes.set_title("tokens per second, single stream")
    axes.set_xlabel("dots: repeats; whiskers: interval of the median")
    for at, row in enumerate(rows):
        speed = row.tokens_per_second
        axes.barh(at, speed.value, color=COLOURS.get(row.key, EXTRA_COLOUR), height=0.62)
        spread = [[max(0.0, speed.value - speed.low)], [max(0.0, speed.high - speed.value)]]
        speeds = repeat_speeds(samples, row.key)
        axes.scatter(speeds, [at] * len(speeds), s=10, color="black", alpha=0.5, zorder=3)
        axes.errorbar(speed.value, at, xerr=spread, color="black", capsize=3, linewidth=1)
        axes.annotate(
            f" {speed.value:.0f}  ({row.to[PLAIN].value:.2f} x)",
            (speed.high, at),
            (6, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(rows)), [textwrap.fill(f"({row.key}) {row.label}", 20) for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.25)


def _ratios(axes: Axes, samples: Sequence[Sample]) -> None:
    """A dot for each prompt, and the bar that the whole has to reach."""
    axes.set_title("times as fast, prompt by prompt")
    axes.set_xlabel("dots: prompts; line: needed in all")
    bars = speed_bars({sample.row for sample in samples})
    for at, (_, faster, slower, needed) in enumerate(bars):
        ratios = sorted(prompt_ratios(samples, faster, slower))
        heights = [at + 0.5 * (index / max(1, len(ratios) - 1) - 0.5) for index in range(len(ratios))]
        axes.scatter(ratios, heights, s=14, color=COLOURS[faster])
        axes.vlines(needed, at - 0.35, at + 0.35, color=NEEDED, linewidth=2)
    axes.set_yticks(range(len(bars)), [textwrap.fill(name, 18) for name, *_ in bars])
    axes.set_xlim(left=0)
    axes.invert_yaxis()


def _gaps(axes: Axes, figures: Sequence[Figure]) -> None:
    """Stacked medians, and the median of the whole, which they do not add up to exactly."""
    axes.set_title("ms beside the forward, p50")
    bars = list(dict.fromkeys((figure.path, figure.row) for figure in figures))
    for at, (path, row) in enumerate(bars):
        left = 0.0
        for one in figures:
            if (one.path, one.row) != (path, row):
                continue
            if one.part == "total":
                axes.plot(one.p50.value, at, "D", color="black", markersize=5)
                continue
            axes.barh(at, one.p50.value, left=left, color=PARTS[one.part], height=0.62)
            left += one.p50.value
        axes.vlines(GAPS_MS[path], at - 0.4, at + 0.4, color=NEEDED, linewidth=2)
    axes.set_yticks(range(len(bars)), [textwrap.fill(f"({row}) {path}", 22) for path, row in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.legend(handles=_legend(figures), loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=4, frameon=False)


def _legend(figures: Sequence[Figure]) -> list[Artist]:
    names = dict.fromkeys(figure.part for figure in figures if figure.part != "total")
    return [
        *(Patch(color=PARTS[name], label=name) for name in names),
        Line2D([], [], color="black", marker="D", markersize=5, linestyle="", label="the whole"),
        Line2D([], [], color=NEEDED, linewidth=2, label="needed"),
    ]
