"""Keeps the tables of docs/RELIABILITY.md equal to the failover matrix, and to what was measured of it and by soaks.

python -m scripts.reliability --write    put them in
python -m scripts.reliability --check    exit 1 if one that is there differs
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.pages import asked_to_write, with_table
from tests.faults.cells import Cell
from tests.faults.matrix import CELLS, shown_by

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "RELIABILITY.md"
RECORDS = ROOT / "bench" / "results"
RESULTS = RECORDS / "failover.json"
# By the target of make that records them.
SOAKS = {"soak": RECORDS / "soak.json", "soak-demo": RECORDS / "soak_demo.json"}
LOAD = RECORDS / "load.json"
PLAYED = RECORDS / "faults.json"
UNMEASURED = "Not measured yet: `make bench-failover`."
UNRECORDED = "Not recorded yet:"


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
    asked, played = results["arguments"], {(cell["where"], cell["fault"]) for cell in results["cells"]}
    unplayed = [f"{cell.where}, {cell.fault}" for cell in CELLS if (cell.where, cell.fault) not in played]
    how = f"{asked['repeats']} plays of each cell, two streams in each, the longest wait for a chunk of both"
    said = (
        f"Measured on {_where(results)}, all processes on it: {how}.",
        f"A step of the emulated target takes {results['step_s']:g} s; undisturbed, the longest wait was",
        f"{results['undisturbed_s']:.3f} s.",
        f"What only keepalive notices lasted for {asked['held_s']:g} s, so that it is seen to.",
        '"-": over before anybody had to do with it.',
        f"Plays that failed, or whose text differed: {len(results['failures'])}.",
        *([f"Not played there: {'; '.join(unplayed)}."] if unplayed else []),
    )
    return f"{grid(rows)}\n\n{' '.join(said)}"


def played_line(results: dict[str, Any]) -> str:
    """Say how much of the matrix a whole run has played, and what did not hold."""
    rows = ", ".join(f"{count} of {len(CELLS)} rows with {of}" for of, count in results["rows"].items())
    wrong = [f"failed: {test}" for test in results["failed"]] + [f"left out: {test}" for test in results["skipped"]]
    run = f"`make test-faults-all` on {_where(results)}, {results['minutes']:g} minutes"
    return (
        f"{run}: {rows}; {results['tests']} tests hold in all, {'; '.join(wrong) or 'none failed, none was left out'}."
    )


def soaks_table(results: dict[str, dict[str, Any]]) -> str:
    """Render what the soaks met and what they found, a run a column."""
    rows = [["", *(f"`make {name}`" for name in results)]]
    runs = list(results.values())
    rows += [[name, *map(shown, runs)] for name, shown in OF_SOAKS.items()]
    names = dict.fromkeys(bar["name"] for run in runs for bar in run["bars"])
    rows += [[name, *(_bar(name, run) for run in runs)] for name in names if name not in OF_SOAKS]
    return grid(rows)


def _counted(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda results: f"{results[name]:,}"


def _faults(results: dict[str, Any]) -> str:
    return str(sum(results["faults"].values()))


def _pauses(results: dict[str, Any]) -> str:
    found = results["longest_pause_of_a_session_s"]
    return f"{found['p50']:.2f}, {found['p99']:.1f}, {found['max']:.1f}"


def _bar(name: str, results: dict[str, Any]) -> str:
    """What was counted; "-" in a run that did not look for it."""
    found = next((bar for bar in results["bars"] if bar["name"] == name), None)
    if found is None:
        return "-"
    return (
        f"{found['value']:g}"
        if found["holds"]
        else f"**{found['value']:g}** (needed {found['sense']} {found['needed']:g})"
    )


def _where(results: dict[str, Any]) -> str:
    machine = results["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, {_commit(results)}"


def _commit(results: dict[str, Any]) -> str:
    commit = results["commit"]
    return "no commit" if commit is None else commit[:7] + (" and changes" if commit.endswith("+") else "")


OF_SOAKS: dict[str, Callable[[dict[str, Any]], str]] = {
    "minutes": lambda results: f"{results['arguments']['minutes']:g}",
    "sessions": _counted("sessions"),
    "tokens": _counted("tokens"),
    "faults": _faults,
    "sessions read by two": _counted("second_readers"),
    "near-ties": _counted("near_ties"),
    "longest wait for a chunk in a session, s: p50, p99, most": _pauses,
    "machine, commit": _where,
}


def load_table(results: dict[str, Any]) -> str:
    """Render what a crowd had and what its bars say."""
    memory = ", ".join(f"{name} {size:g} KiB" for name, size in results["kib_per_session"].items())
    asked, rows = results["arguments"], [["bar", "measured", "needed", "holds"]]
    for bar in results["bars"]:
        value = f"{bar['value']:.4g}"
        if bar["low"] != bar["high"]:
            value = f"{bar['value']:.0f} ({bar['low']:.0f} to {bar['high']:.0f})"
        rows.append([bar["name"], value, f"{bar['sense']} {bar['needed']:g}", "yes" if bar["holds"] else "**no**"])
    said = (
        f"{asked['sessions']:,} sessions at least at a time, for {asked['minutes']:g} minutes on {_where(results)}:",
        f"{results['tokens_per_second']:,.0f} tokens/s; {results['sessions_ended']:,} sessions ended.",
        f"Resident memory of a session, at most: {memory}. Decided for who does not read:",
        f"{min(results['unread_decided']):,} to {max(results['unread_decided']):,} tokens.",
    )
    return f"{grid(rows)}\n\n{' '.join(said)}"


def _soaks() -> str:
    found = {name: json.loads(path.read_text()) for name, path in SOAKS.items() if path.exists()}
    return soaks_table(found) if found else f"{UNRECORDED} `make soak`."


def tables() -> dict[str, str]:
    """By the name of their place in the page."""
    pauses = pauses_table(json.loads(RESULTS.read_text())) if RESULTS.exists() else UNMEASURED
    load = load_table(json.loads(LOAD.read_text())) if LOAD.exists() else f"{UNRECORDED} `make soak-load`."
    played = played_line(json.loads(PLAYED.read_text())) if PLAYED.exists() else f"{UNRECORDED} `make test-faults-all`."
    parts = {"matrix": matrix_table(), "tests": tests_table(), "played": played}
    return parts | {"pauses": pauses, "soaks": _soaks(), "load": load}


def main() -> int:
    """Run the command line."""
    write = asked_to_write(__doc__)
    have = want = PAGE.read_text()
    for name, table in tables().items():
        want = with_table(want, name, "reliability", table)
    if write:
        PAGE.write_text(want)
    elif have != want:
        print(f"{PAGE.name}: tables differ from their sources: run python -m scripts.reliability --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
