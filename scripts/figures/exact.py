"""Tables of what is exact and what it costs: laws, engines, texts of one file, `make fuzz`, `make soak-sim`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scripts.figures import bars_table, grid


def laws_table(results: dict[str, Any]) -> str:
    """Render `make statistics`: p-values by drafter and rule, biased drafters, texts of one seed."""
    rows = [["drafter", "rule", "sessions", "draft tokens tested", "p, first three tokens", "p, those behind", ""]]
    for law in results["laws"]:
        name = law["drafter"] if law["exact"] else f"biased: {law['drafter']}"
        counts = [f"{law[count]:,}" for count in ("sessions", "tested")]
        values = [_p(law[p]) for p in ("p_firsts", "p_steps")]
        rows.append([name, f"`{law['rule']}`", *counts, *values, "refused" if law["refused"] else "accepted"])
    seeds = [["`coupled`, drafted for by", "sessions", "draft tokens accepted", "texts that differ"]]
    for way in results["same_seed"]:
        seeds.append([way["name"], f"{way['sessions']:,}", f"{way['accepted']:,}", str(way["differing"])])
    said = f"A law is refused below p = {results['alpha']:g}. Run at commit {results['commit'][:7]}."
    return f"{grid(rows)}\n\n{said}\n\n{grid(seeds)}"


def peers_table(results: dict[str, Any]) -> str:
    """Render `python -m bench.laws.peer`, with the engines' versions."""
    rows = [["engine", "", "texts", "p, first three tokens", ""]]
    for row in results["rows"]:
        said = "refused" if row["refused"] else "accepted"
        rows.append([row["engine"], row["way"], f"{row['texts']:,}", _p(row["p"]), said])
    packages = results["machine"]["packages"]
    named = {"transformers": "transformers", "openvino-genai": "OpenVINO GenAI"}
    versions = [f"{label} {packages[name]}" for name, label in named.items() if packages[name]]
    return f"{grid(rows)}\n\nWith {', '.join(versions)}."


def reference_table(results: dict[str, Any]) -> str:
    """Render `make bench-reference`: what differed, by how little, the bars, and how far each computes the file."""
    rows = [["runtime", "held to", "texts", "equal", "tokens compared", "the largest margin at a near-tie"]]
    for row in results["rows"]:
        ties = [one["margin"] for one in results["raw"] if one["runtime"] == row["runtime"] and one["near_tie"]]
        counts = [f"{row[count]:,}" for count in ("texts", "equal", "compared")]
        rows.append([row["runtime"], row["expected"], *counts, f"{max(ties):.2g}" if ties else ""])
    own = [["own greedy texts of", "tokens that are best by the file in float32", "nats a token there"]]
    own += [[each["whose"], f"{each['share']:.1%}", f"{each['nats']:.2f}"] for each in results["own_texts"]]
    return f"{grid(rows)}\n\n{bars_table(results)}\n\n{grid(own)}"


def changed_table(results: dict[str, Any]) -> str:
    """Render `make bench-exact`: texts that changed, by how the model is computed."""
    hows = [*results["rows"][0]["changed"]]
    rows = [["computed by", "temperature", "texts", *hows]]
    for row in results["rows"]:
        counts = [str(row["changed"][how]) for how in hows]
        rows.append([row["way"], f"{row['temperature']:g}", str(row["texts"]), *counts])
    return grid(rows)


def _p(value: float) -> str:
    """Render a p-value; less than a float can hold is 0."""
    return f"{value:.2g}" if value > 0.0 else "below 1e-300"


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
