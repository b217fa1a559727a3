"""Tables of what a stack gains: beside its peers, in batches, with heads, in vLLM, on a GPU, on a cluster."""

from __future__ import annotations

from typing import Any

from scripts.figures import bars_table, grid, interval


def stack_table(results: dict[str, Any]) -> str:
    """Render a record of `bench.speed`: rows by piece, tasks, what each row weighs, what is missing, bars."""
    beside = list(dict.fromkeys(peer for row in results["rows"] for peer in row.get("to", ())))
    rows = [["at once, temperature, tokens", "piece", "row", "turns", "tokens/s", "x off"]]
    rows[0] += [*(f"x {peer}" for peer in beside), "a text's mean, x off", "tokens per forward"]
    rows[0] += ["accepted", "accepted by position", "accepted of tested", "ms between tokens, p50, p95"]
    rows[0] += ["s to ready", "resident, peak MiB"]
    facts = {(each["piece"], each["row"]): each for each in results["facts"]}
    for row in results["rows"]:
        fact = facts.get((row["piece"], row["row"]))
        rows.append(
            [
                f"{row['level']}, {row['temperature']:g}, {row['tokens']}",
                *(row["piece"], row["row"], str(row["turns"])),
                *(f"{row['tokens_per_second']['value']:.1f}", interval(row["to_off"])),
                *(interval(row["to"][peer]) if peer in row.get("to", ()) else "" for peer in beside),
                interval(row["text_to_off"]) if row.get("text_to_off") else "",
                f"{row['tokens_per_forward']:.2f}",
                "" if row["acceptance"] is None else f"{row['acceptance']:.2f}",
                " ".join(f"{share:.2f}" for share in row["accepted_at"]),
                ", ".join(f"{name} {hits}/{tests}" for name, (tests, hits) in row["sources"].items()),
                ", ".join(f"{ms:.1f}" for ms in row.get("pauses_ms", ())),
                *(("", "") if fact is None else (f"{fact['ready_seconds']:.1f}", _weight(fact))),
            ]
        )
    return "\n\n".join([grid(rows), *_tasks(results), bars_table(results), _said(results)])


def _tasks(results: dict[str, Any]) -> list[str]:
    if not results["by_task"]:
        return []
    tasks = [["task", "at once, temperature, tokens", "default, x off"]]
    for each in results["by_task"]:
        place = f"{each['level']}, {each['temperature']:g}, {each['tokens']}"
        tasks.append([each["task"], place, interval(each["to_off"])])
    return [grid(tasks)]


def _said(results: dict[str, Any]) -> str:
    missing = [f"{each['piece']}: {each['row']} was not measured: {each['why']}" for each in results["failed"]]
    machine = results["machine"]
    said = f"{results['model']} on {machine['cpu']}, {machine['cores']} cores, rows of a piece interleaved by prompt."
    return "\n".join([said, *missing, *results["notes"]])


def _weight(fact: dict[str, Any]) -> str:
    return f"{fact['resident']:.0f}, {fact['peak']:.0f}"


def gpu_table(results: dict[str, Any]) -> str:
    """Render what `make bench-gpu` measured, with the device's name."""
    steps = [["sessions", "positions of each", "ms per step", "floor, ms", "x floor"]]
    for step in results["steps"]:
        sizes = [str(step["rows"]), str(step["window"])]
        steps.append([*sizes, interval(step["ms"]), f"{step['floor_ms']:.2f}", interval(step["to_floor"])])
    speeds = [["row", "sessions", "tokens/s", "of each", "accepted", "x floor"]]
    for line in results["speeds"]:
        accepted = "" if line["acceptance"] is None else f"{line['acceptance']:.2f}"
        told = [f"{line['tokens_per_session']:.1f}", accepted, interval(line["to_floor"]) if line["to_floor"] else ""]
        speeds.append([line["row"], str(line["sessions"]), interval(line["tokens_per_second"]), *told])
    arguments, floor = results["arguments"], results["floor"]
    how = f"{arguments['target']}, drafter {arguments['draft']}, {arguments['dtype']}, prompt {arguments['prompt']}"
    compiled = "compiled" if results["compiled"] else "not compiled"
    where = f"{results['device']}, {compiled}: {how}; copies at {floor['bandwidth'] / 1e9:.0f} GB/s."
    parts = [grid(steps), grid(speeds), *([bars_table(results)] if results["bars"] else [])]
    return "\n\n".join([*parts, f"{where} {' '.join(results['notes'])}"])


def vllm_table(results: dict[str, Any]) -> str:
    """Render what vLLM's own speculation and specwire's gain on vLLM, by how many sessions are at once."""
    levels = sorted({line["level"] for line in results["lines"]})
    rows = [["row", "temperature", *(f"{level} at once: tokens/s, times off" for level in levels)]]
    found = {(line["row"], line["temperature"], line["level"]): line for line in results["lines"]}
    for row, temperature in dict.fromkeys((line["row"], line["temperature"]) for line in results["lines"]):
        lines = [found.get((row, temperature, level)) for level in levels]
        told = [
            f"{each['tokens_per_second']['value']:.0f}, {interval(each['to_off'])}" if each else "" for each in lines
        ]
        rows.append([row, f"{temperature:g}", *told])
    machine, arguments = results["machine"], results["arguments"]
    bars = results["bars"]
    held = f"{sum(bar['holds'] for bar in bars)} of {len(bars)} bars hold."
    how = f"{arguments['prompts']} held-out prompts x {arguments['tokens']} tokens, {arguments['repeats']} repeats"
    return f"{grid(rows)}\n\nMeasured on {machine['cpu']}, {machine['cores']} cores, float32, eager: {how}. {held}"


def cluster_table(results: dict[str, Any]) -> str:
    """Render `make bench-cluster`: rows, beside the simulator's, what the orchestrators take, and the bars."""
    rows = [
        ["row", "sessions", "tokens/s", "simulated", "measured / simulated", "while all run", "each one's, x one's"]
    ]
    whole = ["tokens/s per core", "of a core, each", "cores in use, all"]
    costs = [["row", "us of orchestrators per decided token", *whole]]
    for row in results["rows"]:
        speed, simulated = row["tokens_per_second"]["value"], row["simulated"]
        to_one = "" if row["to_one"] is None else interval(row["to_one"])
        expected = ["", ""] if simulated is None else [f"{simulated:.1f}", f"{speed / simulated:.2f}"]
        rows.append(
            [row["name"], str(row["sessions"]), f"{speed:.1f}", *expected, f"{row['steady']['value']:.1f}", to_one]
        )
        cost = row["orchestrator_us"]
        us = f"{cost['value']:.0f} ({cost['low']:.0f} to {cost['high']:.0f})"
        shares = [f"{row['busy']:.2f}", f"{row['cores']:.2f}"]
        costs.append([row["name"], us, f"{row['tokens_per_core']:.0f}", *shares])
    missed = [
        f"Missed: {bar['name']}: {interval(bar)}, needed {bar['sense']} {bar['needed']:g}."
        for bar in results["bars"]
        if not bar["holds"]
    ]
    machine, asked = results["machine"], results["arguments"]
    how = (
        f"Emulated: a forward of m sessions sleeps {asked['V_ms']:g} ms x (1 + {asked['slope']:g} (m - 1)),",
        f"a flat verifier's {asked['V_ms']:g} ms.",
        f"Measured on {machine['cpu']}, {machine['cores']} cores for all processes, the clients among them:",
        f"{asked['repeats']} repeats, rows in turn; median and its 95 % interval.",
        f"An orchestrator's limit: {max(row['tokens_per_core'] for row in results['rows']):.0f} tokens/s for a core.",
    )
    return "\n\n".join([grid(rows), grid(costs), *missed, " ".join(how)])
