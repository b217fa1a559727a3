"""The tables of `make fuzz` and `make soak-sim`."""

from collections.abc import Mapping
from typing import Any

from scripts.figures.markdown import grid

NOTHING = "nothing of what is not allowed"


def fuzz_table(results: dict[str, Any]) -> str:
    """Render how often each target was tried and answered how, and what was found."""
    rows = [["what", "tried", "answers"]]
    for target in results["targets"]:
        answers = ", ".join(f"{answer} {count}" for answer, count in target["answers"].items())
        rows.append([target["name"], str(target["tried"]), answers])
    machine, (first, last) = results["machine"], results["resident_mib"]
    commit = results["commit"] or "unknown"
    of = commit[:12] + (" and changes" if commit.endswith("+") else "")
    said = (
        f"Commit {of}, {results['minutes']:g} minutes, {results['rounds']} rounds of {results['examples']} tries,",
        f"on {machine['cpu']}, {machine['cores']} cores. Memory of the process,",
        f"which holds all services: {first} MiB after the first round, {last} MiB after the last.",
        f"Found: {'; '.join(' '.join(each.split()) for each in results['findings']) or NOTHING}.",
    )
    return f"{grid(rows)}\n\n{' '.join(said)}"


def simulation_table(results: dict[str, Any]) -> str:
    """Render what was run, where, and what it came to."""
    machine, commit = results["machine"], results["commit"] or "no commit"
    changed = " and changes" if commit.endswith("+") else ""
    processes = results.get("processes", 1)
    cores = "one core" if processes == 1 else f"{processes} cores"
    where = f"`make soak-sim` of commit {commit[:7]}{changed}, on {cores} of {machine['cpu']}:"
    return f"{where}\n\n```text\n{simulation_summary(results)}\n```"


def simulation_summary(results: Mapping[str, Any]) -> str:
    """What many seeds came to: also the end of `make soak-sim`. results: as `tests.simulation.record` writes them."""
    failed, states = results["failed"], f"{results['states']} states"
    attempts = f"{results['attempts']} attempts after the first"
    which = f" ({', '.join(map(str, failed))})" if failed else ""
    told = {
        "simulated": f"{results['simulated_hours']} hours, {results['callbacks']} callbacks, {states}",
        "requests:": f"{results['requests']}, {results['tokens']} tokens, {attempts}",
        **{f"{name}:": _listed(results[name]) for name in ("faults", "ends", "reached")},
    }
    head = f"simulation: {results['seeds']} seeds in {results['took_s']:.0f} s, {len(failed)} failed{which}"
    return "\n".join([head, *(f"  {name} {text}" for name, text in told.items())])


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
