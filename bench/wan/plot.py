"""Tokens per second against round-trip time: simulated curves, measured points, the demo pair beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench.harness.interval import Estimate
from bench.harness.runs import of_row
from bench.wan.cells import ACCEPTANCES, DRAFTS_MS, LIGHT
from bench.wan.disciplines import CHAIN, DEFAULT, DISCIPLINES, PLAIN, STREAM_WAIT, TEXTBOOK, tokens_per_second
from bench.wan.emulated import EmulatedTimes
from bench.wan.real_pair import MeasuredPair
from bench.wan.results import WanResults
from bench.wan.virtual import ExpectedCell

COLOURS = {PLAIN: "#627282", TEXTBOOK: "#c0603a", STREAM_WAIT: "#c9a227", CHAIN: "#7fb2d9", DEFAULT: "#1f6fb2"}
OPTIMUM = "#222222"
# Slopes of V(m) by the look of the measured points; curves are drawn for the first.
MARKERS = {0.0: "o", 0.02: "s", 0.05: "^"}


def draw(results: WanResults, path: Path) -> None:
    matplotlib.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    canvas = Figure(figsize=(16, 11), layout="constrained")
    panels = canvas.subplots(len(DRAFTS_MS) + 1, len(ACCEPTANCES), sharex=True)
    for axes in panels.flat:
        axes.tick_params(labelbottom=True)
    for row, draft_ms in zip(panels, DRAFTS_MS, strict=False):
        for axes, wanted in zip(row, ACCEPTANCES, strict=True):
            axes.set_title(f"d = {draft_ms:g} ms, a = {wanted:g}")
            place = (draft_ms, wanted)
            _curves(axes, [one for one in results.grid if (one.cell.draft_ms, one.cell.acceptance) == place])
            _points(axes, [one for one in results.cells if (one.cell.draft_ms, one.cell.acceptance) == place])
            axes.set_ylim(bottom=0)
    _pair(panels[-1][0], results.pair)
    for axes in panels[-1][1:]:
        axes.set_visible(False)
    for row in panels:
        row[0].set_ylabel("tokens/s")
    canvas.legend(handles=_legend(), loc="lower right", bbox_to_anchor=(0.98, 0.03), fontsize=10, frameon=False)
    canvas.savefig(path, dpi=100)


def _curves(axes: Axes, expected: Sequence[ExpectedCell]) -> None:
    """In virtual time, where V does not grow with m and d hardly with W."""
    flat = sorted(
        (one for one in expected if one.cell.slope == 0.0 and one.cell.row_cost == LIGHT),
        key=lambda one: one.cell.rtt_ms,
    )
    at = [one.cell.rtt_ms for one in flat]
    for name in DISCIPLINES:
        axes.plot(at, [one.speeds[name] for one in flat], color=COLOURS[name], linewidth=1.2)
    axes.plot(at, [one.optimum for one in flat], color=OPTIMUM, linewidth=1, linestyle=":")


def _points(axes: Axes, cells: Sequence[EmulatedTimes]) -> None:
    for one in cells:
        for name in one.expected.speeds:
            speed = tokens_per_second(one.samples, name)
            _point(axes, one.cell.rtt_ms, speed, COLOURS[name], MARKERS[one.cell.slope])


def _point(axes: Axes, at: float, speed: Estimate, colour: str, marker: str) -> None:
    spread = [[max(0.0, speed.value - speed.low)], [max(0.0, speed.high - speed.value)]]
    axes.errorbar(at, speed.value, yerr=spread, color=colour, marker=marker, markersize=5, capsize=2, linestyle="")


def _pair(axes: Axes, pair: Sequence[MeasuredPair]) -> None:
    axes.set_title("demo pair, real forwards")
    axes.set_xlabel("round-trip time, ms")
    for name in DISCIPLINES:
        known = {one.rtt_ms: tokens_per_second(one.samples, name) for one in pair if of_row(one.samples, name)}
        axes.plot(list(known), [speed.value for speed in known.values()], color=COLOURS[name], linewidth=1.2)
        for rtt, speed in known.items():
            _point(axes, rtt, speed, COLOURS[name], "o")
    axes.set_ylim(bottom=0)


def _legend() -> list[Line2D]:
    return [
        *(Line2D([], [], color=COLOURS[name], label=name) for name in DISCIPLINES),
        Line2D(
            [],
            [],
            color=OPTIMUM,
            linestyle=":",
            label="simulated: best of the fixed settings, branches included",
        ),
        Line2D([], [], color="#888888", label="lines: simulated, V flat (demo pair: measured)"),
        *(
            Line2D(
                [], [], color="#888888", linestyle="", marker=marker, label=f"measured, emulated devices, s = {slope:g}"
            )
            for slope, marker in MARKERS.items()
        ),
    ]
