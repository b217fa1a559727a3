"""What a measurement tells at its end: tables, and bars, which hold only with their whole interval.

">= x" needs the interval's lower bound to reach x, "<= x" the upper one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.harness.interval import Estimate


@dataclass(frozen=True, slots=True)
class Bar:
    """One requirement; `value` must be on the right side of `needed` with its whole interval."""

    name: str
    value: float
    low: float
    high: float
    sense: str
    needed: float
    holds: bool


def at_least(name: str, value: Estimate, needed: float) -> Bar:
    return Bar(name, value.value, value.low, value.high, ">=", needed, value.low >= needed)


def at_most(name: str, value: Estimate, needed: float) -> Bar:
    return Bar(name, value.value, value.low, value.high, "<=", needed, value.high <= needed)


def exactly(value: float) -> Estimate:
    """Of what was counted."""
    return Estimate(value, value, value, 1.0)


def none_of(name: str, count: float) -> Bar:
    """What must not occur."""
    return at_most(name, exactly(count), 0)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [_line(row, widths) for row in (head, *rows)]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
    return "  ".join(cells).rstrip()


def bar_lines(bars: Sequence[Bar]) -> list[str]:
    head = ("bar", "value", "interval", "needed", "")
    body = [
        (
            bar.name,
            f"{bar.value:.3g}",
            f"{bar.low:.3g} .. {bar.high:.3g}",
            f"{bar.sense} {bar.needed:g}",
            "holds" if bar.holds else "MISSED",
        )
        for bar in bars
    ]
    return table(head, body)
