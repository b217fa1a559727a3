"""The picture beside the tables: how many times as fast as off each row is, greedy and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.real.report import RealLine, RealResults
from bench.real.rows import DEFAULT, OURS

OURS_COLOUR, DEFAULT_COLOUR, THEIR_COLOUR, OFF_COLOUR = "#7fb3d5", "#1f6fb2", "#9aa5b1", "#b03a2e"


def draw(found: RealResults, path: Path) -> None:
    """A panel for each place (sessions at once, temperature, tokens), a bar for each of its rows."""
    matplotlib.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    places = list(dict.fromkeys((line.tokens, line.level, line.temperature) for line in found.lines))
    groups = [[each for each in found.lines if (each.tokens, each.level, each.temperature) == at] for at in places]
    most = max(map(len, groups))
    canvas = Figure(
        figsize=(5.2 * min(len(groups), 4), (0.32 * most + 1.4) * -(-len(groups) // 4)), layout="constrained"
    )
    panels = canvas.subplots(-(-len(groups) // 4), min(len(groups), 4), squeeze=False).flatten()
    for axes, lines in zip(panels, groups, strict=False):
        _panel(axes, lines)
    for axes in panels[len(groups) :]:
        axes.set_visible(False)
    canvas.suptitle(f"{found.name}: times as fast as off beside it (whiskers: 95 %)")
    canvas.savefig(path, dpi=90)


def _panel(axes: Axes, lines: Sequence[RealLine]) -> None:
    one = lines[0]
    axes.set_title(f"{one.level} at once, temperature {one.temperature:g}, {one.tokens} tokens")
    for at, line in enumerate(lines):
        ratio = line.to_off
        colour = DEFAULT_COLOUR if line.row == DEFAULT else OURS_COLOUR if line.row in OURS else THEIR_COLOUR
        axes.barh(at, ratio.value, color=colour, height=0.7)
        whisker = [[max(0.0, ratio.value - ratio.low)], [max(0.0, ratio.high - ratio.value)]]
        axes.errorbar(ratio.value, at, xerr=whisker, color="black", capsize=2, linewidth=1)
        speed = f"{line.tokens_per_second.value:.0f}/s"
        axes.annotate(speed, (ratio.high, at), (4, 0), textcoords="offset points", va="center")
    axes.axvline(1.0, color=OFF_COLOUR, linewidth=1)
    axes.set_yticks(range(len(lines)), [line.row for line in lines])
    axes.invert_yaxis()
    axes.margins(x=0.15)
