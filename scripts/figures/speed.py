"""Tables of what a stack on one machine gains: beside its peers, in batches, with heads, in vLLM, on a GPU."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bench.batch.figures import text_ratio
from bench.main.report import core_ms
from scripts.figures.markdown import bars_table, grid, interval

# Rows that others are a multiple of.
PEERS = {"a": "transformers", "b": "assisted", "e": "OpenVINO GenAI"}


def speed_table(results: dict[str, Any]) -> str:
    """Render the rows of `make bench` or `make bench-box`: median and 95 % interval over the repeats."""
    peers = [f"x {PEERS[peer]}" for peer in results["rows"][0]["to"]]
    rows = [["row", "tokens/s", *peers, "tokens per forward", "acceptance", "first token, ms", "core-ms per token"]]
    for row in results["rows"]:
        speed = row["tokens_per_second"]["value"]
        accepted = "" if row["acceptance"] is None else f"{row['acceptance']:.2f}"
        rows.append(
            [
                f"({row['key']}) {row['label']}",
                f"{speed:.0f}",
                *map(interval, row["to"].values()),
                f"{row['tokens_per_forward']:.2f}",
                accepted,
                f"{row['first_token_ms']:.0f}",
                f"{core_ms(results['cores_in_use'][row['key']], speed):.2f}",
            ]
        )
    machine, arguments = results["machine"], results["arguments"]
    how = f"{arguments['prompts']} held-out prompts x {arguments['tokens']} tokens, {arguments['repeats']} repeats"
    where = f"{machine['cpu']}, {machine['cores']} cores, {arguments['dtype']}"
    measured = f"Measured on {where}: {how}, interleaved; median and its 95 % interval."
    return f"{grid(rows)}\n\n{measured}"


def batch_table(results: dict[str, Any]) -> str:
    """Render `make bench-batch`: rows, the verifier's work beside its forwards, requests that arrive, bars.

    Multiples of off: until the last text has ended, while all decode, and of how soon a text is there on average.
    """
    rows = [["at once", "row", "tokens/s", "x off", "while full", "a text's mean", "ms between tokens, p50", "p95"]]
    rows[0].append("first token, ms")
    outside = [["at once", "row", "us between forwards, p50", "of each session", "forward, us", "share of the forward"]]
    for row in results["rows"]:
        speed = f"{row['tokens_per_second']['value']:.0f}"
        pauses = [f"{row['pause_p50_ms']:.1f}", f"{row['pause_p95_ms']:.1f}", f"{row['first_token_ms']:.0f}"]
        full = interval(row["full_to_off"]) if row.get("full_to_off") else ""
        text = interval(asdict(text_ratio(results["raw"], row["level"], row["row"])))
        rows.append([str(row["level"]), row["label"], speed, interval(row["to_off"]), full, text, *pauses])
        found = row["outside"]
        if found is not None:
            times = [f"{found['step_us']['value']:.0f}", f"{found['session_us']:.1f}", f"{found['forward_us']:.0f}"]
            outside.append([str(row["level"]), row["label"], *times, interval(found["share"])])
    loads = [["requests arriving", "row", "tokens/s", "in time, tokens/s", "in time", "first token p95, ms"]]
    for load in results["loads"]:
        name = f"{load['requests_per_second']:.1f}/s ({load['share']:.0%} of off)"
        speeds = [interval(load["tokens_per_second"]), interval(load["goodput"])]
        loads.append([name, load["label"], *speeds, f"{load['in_time']:.0%}", f"{load['first_p95_ms']:.0f}"])
    machine, arguments = results["machine"], results["arguments"]
    how = f"{arguments['tokens']} tokens each, {arguments['repeats']} repeats, interleaved; {arguments['dtype']}"
    parts = [grid(rows), grid(outside), *([grid(loads)] if results["loads"] else []), bars_table(results)]
    parts += [f"Measured on {machine['cpu']}, {machine['cores']} cores: {how}. {' '.join(results['notes'])}"]
    return "\n\n".join(parts)


def heads_table(results: dict[str, Any]) -> str:
    """Render `make bench-heads`: rows by sessions and temperature, bars."""
    rows = [["at once", "temperature", "row", "tokens/s", "x off", "x off while all decode"]]
    rows[0] += ["tokens per forward", "accepted by position", "accepted of tested", "the head's share of the step"]
    for row in results["rows"]:
        accepted = " ".join(f"{share:.2f}" for share in row["accepted_at"])
        of_tested = ", ".join(f"{name} {hits}/{tests}" for name, (tests, hits) in row["sources"].items())
        share = "" if row["head_share"] is None else f"{row['head_share']:.0%}"
        place = [str(row["level"]), f"{row['temperature']:g}", row["label"]]
        speed = [f"{row['tokens_per_second']['value']:.0f}", interval(row["to_off"])]
        full = row.get("full_to_off")  # older records have none
        speed.append("" if full is None else interval(full))
        rows.append([*place, *speed, f"{row['tokens_per_forward']:.2f}", accepted, of_tested, share])
    machine, arguments = results["machine"], results["arguments"]
    how = f"{arguments['prompts']} held-out prompts x {arguments['tokens']} tokens, interleaved; {arguments['dtype']}"
    said = f"Measured on {machine['cpu']}, {machine['cores']} cores: {how}. {' '.join(results['notes'])}"
    return "\n\n".join([grid(rows), bars_table(results), said])


def real_table(results: dict[str, Any]) -> str:
    """Render `make bench-real` of one model: rows by piece, tasks, what each row weighs, what is missing, bars."""
    rows = [["at once, temperature, tokens", "piece", "row", "turns", "tokens/s", "x off", "tokens per forward"]]
    rows[0] += ["accepted", "accepted by position", "accepted of tested", "s to ready", "resident, peak MiB"]
    facts = {(each["piece"], each["row"]): each for each in results["facts"]}
    for row in results["rows"]:
        fact = facts.get((row["piece"], row["row"]))
        rows.append(
            [
                f"{row['level']}, {row['temperature']:g}, {row['tokens']}",
                *(row["piece"], row["row"], str(row["turns"])),
                *(f"{row['tokens_per_second']['value']:.1f}", interval(row["to_off"])),
                f"{row['tokens_per_forward']:.2f}",
                "" if row["acceptance"] is None else f"{row['acceptance']:.2f}",
                " ".join(f"{share:.2f}" for share in row["accepted_at"]),
                ", ".join(f"{name} {hits}/{tests}" for name, (tests, hits) in row["sources"].items()),
                *(("", "") if fact is None else (f"{fact['ready_seconds']:.1f}", _weight(fact))),
            ]
        )
    tasks = [["task", "at once, temperature, tokens", "default, x off"]]
    for each in results["by_task"]:
        place = f"{each['level']}, {each['temperature']:g}, {each['tokens']}"
        tasks.append([each["task"], place, interval(each["to_off"])])
    missing = [f"{each['piece']}: {each['row']} was not measured: {each['why']}" for each in results["failed"]]
    machine = results["machine"]
    said = f"{results['model']} on {machine['cpu']}, {machine['cores']} cores, rows of a piece interleaved by prompt."
    parts = [grid(rows), grid(tasks), bars_table(results), "\n".join([said, *missing, *results["notes"]])]
    return "\n\n".join(parts)


def _weight(fact: dict[str, Any]) -> str:
    return f"{fact['resident']:.0f}, {fact['peak']:.0f}"


def step_table(results: dict[str, Any]) -> str:
    """Render `make bench-step`: each step, as a multiple of its runtime's V(1) and of the peer's time per token."""
    rows = [["runtime", "sessions", "positions of each", "ms", "x its V(1)", "x OpenVINO GenAI's token"]]
    for row in results["rows"]:
        sizes = [str(row["sessions"]), ", ".join(map(str, row["windows"]))]
        to_peer = "" if row["to_peer"] is None else interval(row["to_peer"])
        rows.append([row["runtime"], *sizes, interval(row["ms"]), interval(row["to_one"]), to_peer])
    machine, arguments = results["machine"], results["arguments"]
    how = f"{arguments['prompts']} held-out texts x {arguments['tokens']} tokens, {arguments['repeats']} repeats"
    where = f"{machine['cpu']}, {arguments['threads']} threads of {machine['cores']} cores, {arguments['dtype']}"
    said = " ".join([f"Measured on {where}: {how}, interleaved.", *results["notes"]])
    return "\n\n".join([grid(rows), *([bars_table(results)] if results["bars"] else []), said])


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
