"""Keeps the tables of docs/RELIABILITY.md equal to the failover matrix and to the pauses that were measured.

python -m scripts.reliability --write    put them in
python -m scripts.reliability --check    exit 1 if one that is there differs
"""

import json
import sys
from pathlib import Path
from typing import Any

from scripts.pages import asked_to_write, with_table
from tests.faults.cells import Cell
from tests.faults.matrix import CELLS, shown_by

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "RELIABILITY.md"
RESULTS = ROOT / "bench" / "results" / "failover.json"
UNMEASURED = "Not measured yet: `make bench-failover`."


def grid(rows: list[list[str]]) -> str:
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def matrix_table() -> str:
    """Render the cells, parties first."""
    rows = [["what", "fault", "the client sees", "noticed within", "then", "pause at most, s"]]
    rows += [_row(cell) for cell in CELLS]
    return grid(rows)


def _row(cell: Cell) -> list[str]:
    return [cell.where, cell.fault, cell.seen, str(cell.noticed), cell.then, cell.pause]


def tests_table() -> str:
    """Render which tests show a cell."""
    rows = [["what", "fault", "tests"]]
    rows += [[cell.where, cell.fault, ", ".join(f"`{test}`" for test in shown_by(cell))] for cell in CELLS]
    return grid(rows)


def pauses_table(results: dict[str, Any]) -> str:
    """Render each cell's times, the median play's and the worst one's, and their bounds."""
    rows = [["what", "fault", "noticed, s", "worst", "within", "pause, s", "worst", "at most", "holds"]]
    for cell in results["cells"]:
        names = ("noticed_p50_s", "noticed_max_s", "within_s", "p50_s", "max_s", "bound_s")
        measured = ["-" if cell[name] is None else f"{cell[name]:.2f}" for name in names]
        rows.append([cell["where"], cell["fault"], *measured, "yes" if cell["holds"] else "**no**"])
    machine, asked = results["machine"], results["arguments"]
    where = f"{machine['cpu']}, {machine['cores']} cores, all processes on it"
    how = f"{asked['repeats']} plays of each cell, two streams in each, the longest wait for a chunk of both"
    said = (
        f"Measured on {where}: {how}.",
        f"A step of the emulated target takes {results['step_s']:g} s; undisturbed, the longest wait was",
        f"{results['undisturbed_s']:.3f} s.",
        f"What only keepalive notices lasted for {asked['held_s']:g} s, so that it is seen to.",
        '"-": over before anybody had to do with it.',
        f"Plays that failed, or whose text differed: {len(results['failures'])}.",
    )
    return f"{grid(rows)}\n\n{' '.join(said)}"


def tables() -> dict[str, str]:
    """By the name of their place in the page."""
    pauses = pauses_table(json.loads(RESULTS.read_text())) if RESULTS.exists() else UNMEASURED
    return {"matrix": matrix_table(), "tests": tests_table(), "pauses": pauses}


def main() -> int:
    """Run the command line."""
    write = asked_to_write(__doc__)
    have = want = PAGE.read_text()
    for name, table in tables().items():
        want = with_table(want, name, "reliability", table)
    if write:
        PAGE.write_text(want)
    elif have != want:
        print(f"{PAGE.name}: the tables differ from tests/faults/matrix.py: run python -m scripts.reliability --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
