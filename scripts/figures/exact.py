"""Tables of what is exact and what it costs: laws, engines beside, texts of the same file."""

from __future__ import annotations

from typing import Any

from scripts.figures.markdown import bars_table, grid


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
