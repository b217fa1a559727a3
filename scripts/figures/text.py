"""The table of `make bench-suffix`."""

from __future__ import annotations

from typing import Any

from scripts.figures.markdown import bars_table, grid, interval


def suffix_table(results: dict[str, Any]) -> str:
    """Render `make bench-suffix`: rows by kind of step, a table's too, texts told again, bars, what a look-up takes."""
    rows = [["temperature", "steps", "proposed from", "tokens/s", "x nothing", "tokens per forward", "accepted"]]
    for row in results["rows"]:
        accepted = "" if row["acceptance"] is None else f"{row['acceptance']:.2f}"
        speed = [f"{row['tokens_per_second']['value']:.0f}", interval(row["to_off"])]
        place = [f"{row['temperature']:g}", row["steps"], row["label"]]
        rows.append([*place, *speed, f"{row['tokens_per_forward']:.2f}", accepted])
    again = [["temperature", "steps", "told again, guessed from", "tokens a guess", "accepted", "us a guess"]]
    for row in results["replayed"]:
        accepted = "" if row["accepted"] is None else f"{row['accepted']:.2f}"
        place = [f"{row['temperature']:g}", row["steps"]] if "steps" in row else ["all", "all"]
        again.append([*place, row["label"], f"{row['tokens_a_guess']:.2f}", accepted, f"{row['us']:.1f}"])
    found, arguments = results["look_up"], results["arguments"]
    look = f"A look-up takes {found['own_us']['value']:.1f} us in the own text, {found['shared_us']['value']:.1f} us"
    beside = f"beside {found['others'] / 1e6:g} M tokens of others, {found['bytes_a_token']:.0f} MB a million"
    how = f"{arguments['prompts']} pieces of code x {arguments['tokens']} tokens, {arguments['tenants']} tenants"
    said = f"{look} {beside}. {_measured(results)}: {how}, {_repeats(arguments)}."
    return "\n\n".join([grid(rows), grid(again), bars_table(results), said])


def _measured(results: dict[str, Any]) -> str:
    return f"Measured on {results['machine']['cpu']}, {results['machine']['cores']} cores"


def _repeats(arguments: dict[str, Any]) -> str:
    return f"{arguments['repeats']} repeats, interleaved; {arguments['dtype']}"
