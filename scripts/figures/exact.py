"""Tables of what is exact and what it costs: laws, engines beside, bit-for-bit texts."""

from __future__ import annotations

from typing import Any

from scripts.figures.markdown import grid, interval

# What the mixes of `make bench-deterministic` count, and what it is called.
MIXED = {"moves": "takeovers", "accepted": "draft tokens accepted"}


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


def deterministic_table(results: dict[str, Any]) -> str:
    """Render `make bench-deterministic`: tokens that differ either way, and what a step costs."""
    rows = [["dtype", "", "tokens that differ", "of", "rate"]]
    # Older records do not say what happened in the mixes.
    happened = {name: label for name, label in MIXED.items() if all(name in row for row in results["texts"])}
    rows[0] += happened.values()
    for row in results["texts"]:
        rate, counts = row["differing"] / row["compared"], [f"{row[name]:,}" for name in happened]
        rows.append([row["dtype"], row["way"], str(row["differing"]), f"{row['compared']:,}", f"{rate:.1e}", *counts])
    costs = [["dtype", "sessions", "positions of each", "as usual, ms", "deterministic, ms", "ratio"]]
    for row in results["times"]:
        times = [interval(row[name]) for name in ("usual_ms", "deterministic_ms", "ratio")]
        costs.append([row["dtype"], str(row["sessions"]), str(row["window"]), *times])
    arguments = results["arguments"]
    how = f"{arguments['sessions']} sessions x {arguments['tokens']} tokens alone, then in {arguments['mixes']} mixes"
    return (
        f"{grid(rows)}\n\n{grid(costs)}\n\n{_where(results)}: {how}; steps: {arguments['repeats']} repeats, by turns."
    )


def _p(value: float) -> str:
    """Render a p-value; less than a float can hold is 0."""
    return f"{value:.2g}" if value > 0.0 else "below 1e-300"


def _where(results: dict[str, Any]) -> str:
    machine, threads = results["machine"], results["arguments"]["threads"]
    return f"Measured on {machine['cpu']}, {threads} of {machine['cores']} cores"
