"""The failover matrix, its bounds, and the tables of what was measured of it, on a cluster and by soaks."""

from collections.abc import Callable
from typing import Any

from scripts.figures import grid
from tests.faults.matrix import CELLS, LINK_FAULTS, LINKS, PARTIES, PARTY_FAULTS, Cell, shown_by


def matrix_table() -> str:
    """Render the cells, parties first."""
    rows = [["what", "fault", "the client sees", "noticed within", "then", "pause at most, s"]]
    rows += [_row(cell) for cell in CELLS]
    return grid(rows)


def _row(cell: Cell) -> list[str]:
    return [cell.where, cell.fault, cell.seen, str(cell.noticed), cell.then, cell.pause]


def bounds_table() -> str:
    """Render how many seconds text may pause, of processes and of connections, a fault a column."""
    return "\n\n".join([_bounds("process", PARTIES, PARTY_FAULTS), _bounds("connection", LINKS, LINK_FAULTS)])


def _bounds(kind: str, places: tuple[str, ...], faults: tuple[str, ...]) -> str:
    told = {(cell.where, cell.fault): "nothing" if cell.unseen else cell.pause for cell in CELLS}
    return grid([[kind, *faults], *([place, *(told[place, fault] for fault in faults)] for place in places)])


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


def ran_table(results: dict[str, Any]) -> str:
    """Render a run of `make test-vllm`: a row for each test, its variants in one, and what it ran on."""
    found: dict[str, list[dict[str, Any]]] = {}
    for test in results["tests"]:
        found.setdefault(test["test"].partition("[")[0], []).append(test)
    rows = [["test", "hold", "of", "s"]]
    for name, variants in found.items():
        hold = sum(test["end"] == "passed" for test in variants)
        rows.append([f"`{name}`", str(hold), str(len(variants)), f"{sum(test['seconds'] for test in variants):.0f}"])
    rows += [[bar["name"], _bar(bar), "", ""] for bar in results["bars"]]
    wrong = [f"{test['end']}: {test['test']}" for test in results["tests"] if test["end"] != "passed"]
    versions = ", ".join(f"{package} {version}" for package, version in sorted(results["vllm"].items()))
    run = f"`make test-vllm` on {_where(results)}, {results['minutes']:g} minutes, with {versions}"
    whole = all(bar["holds"] for bar in results["bars"])
    end = "none failed, none was left out" if whole else "none failed, but not all were run"
    return f"{grid(rows)}\n\n{run}: {'; '.join(wrong) or end}."


def soak_table(results: dict[str, Any]) -> str:
    """Render what a soak met and what it found."""
    rows = [["", "found"], *([name, shown(results)] for name, shown in OF_SOAKS.items())]
    rows += [[bar["name"], _bar(bar)] for bar in results["bars"] if bar["name"] not in OF_SOAKS]
    return grid(rows)


def _counted(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda results: f"{results[name]:,}"


def _faults(results: dict[str, Any]) -> str:
    return str(sum(results["faults"].values()))


def _pauses(results: dict[str, Any]) -> str:
    found = results["longest_pause_of_a_session_s"]
    return f"{found['p50']:.2f}, {found['p99']:.1f}, {found['max']:.1f}"


def _bar(bar: dict[str, Any]) -> str:
    value = f"{bar['value']:g}"
    return value if bar["holds"] else f"**{value}** (needed {bar['sense']} {bar['needed']:g})"


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


def conformance_table(results: dict[str, Any]) -> str:
    """Render what became of each suite's tests."""
    rows = [["suite", "passed", "by design", "failed"]]
    for row in results["raw"]:
        told = f" ({row['told']})" if row.get("told") else ""
        counts = [f"{row[name]:,}" for name in ("passed", "by_design", "failed")]
        rows.append([row["suite"], counts[0] + told, *counts[1:]])
    return grid(rows)


def cluster_faults_table(results: dict[str, Any]) -> str:
    """Render how long text paused in each fault of `make test-cluster`."""
    rows = [["what happens under load", "longest wait for a chunk before, s", "from then on, s", "until Ray knew, s"]]
    for each in results["faults"]:
        ray = "" if each["ray_s"] is None else f"{each['ray_s']:.2f}"
        rows.append([each["fault"], f"{each['usual_s']:.2f}", f"{each['pause_s']:.2f}", ray])
    machine = results["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores for all nodes"
    return f"{grid(rows)}\n\nSeen once, on {where}; a step of the emulated target takes 0.25 s."
