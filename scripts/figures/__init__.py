"""The tables of recorded runs: a module for what is measured together; `python -m scripts.figures` prints them.

Here is what tables are made of: rows, medians with intervals, bars; and where in a page one stands.
"""

from __future__ import annotations

from typing import Any


def grid(rows: list[list[str]]) -> str:
    """Render rows, the first of which is the head."""
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def interval(estimate: dict[str, float]) -> str:
    """Render a median and its interval."""
    return f"{estimate['value']:.2f} ({estimate['low']:.2f} to {estimate['high']:.2f})"


def bars_table(results: dict[str, Any]) -> str:
    """Render every bar of a record, those that do not hold too."""
    rows = [["bar", "measured", "needed", "holds"]]
    for bar in results["bars"]:
        needed = f"{bar['sense']} {bar['needed']:g}"
        rows.append([bar["name"], interval(bar), needed, "yes" if bar["holds"] else "**no**"])
    return grid(rows)


def with_table(page: str, name: str, table: str) -> str:
    """Replace what stands between a table's markers; raises ValueError where one is missing."""
    begin, end = f"<!-- {name}: written by scripts/figures -->", f"<!-- end of {name} -->"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"needs the markers {begin} and {end}, in this order")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"
