"""Prints the tables of the recorded results, and keeps those that stand in pages equal to their sources.

python -m scripts.figures              print every table that bench/results has
python -m scripts.figures laws wan     print these
python -m scripts.figures --write      put the tables that stand in pages there
python -m scripts.figures --check      exit 1 if one that is there differs
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.cluster_figures import cluster_faults_table, cluster_table, ingress_table
from scripts.exact_figures import deterministic_table, dtypes_table, laws_table, peers_table
from scripts.fuzz_figures import fuzz_table, simulation_table
from scripts.pages import bars_table, grid, interval, with_table
from scripts.reliability import (
    bounds_table,
    load_table,
    matrix_table,
    pauses_table,
    played_line,
    soak_table,
    tests_table,
)
from scripts.text_figures import learn_table, rag_table, suffix_table
from scripts.wan_figures import (
    branch_bytes_table,
    branching_table,
    capacity_table,
    draft_rows_table,
    pairs_table,
    placement_table,
    wan_table,
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
# Rows that others are a multiple of.
PEERS = {"a": "transformers", "b": "assisted", "e": "OpenVINO GenAI"}


def speed_table(results: dict[str, Any]) -> str:
    """Render the rows of `make bench` or `make bench-box`: median and 95 % interval over the repeats."""
    peers = [f"x {PEERS[peer]}" for peer in results["rows"][0]["to"]]
    rows = [["row", "tokens/s", *peers, "tokens per forward", "acceptance"]]
    for row in results["rows"]:
        accepted = "" if row["acceptance"] is None else f"{row['acceptance']:.2f}"
        rows.append(
            [
                f"({row['key']}) {row['label']}",
                f"{row['tokens_per_second']['value']:.0f}",
                *map(interval, row["to"].values()),
                f"{row['tokens_per_forward']:.2f}",
                accepted,
            ]
        )
    machine, arguments = results["machine"], results["arguments"]
    how = f"{arguments['prompts']} held-out prompts x {arguments['tokens']} tokens, {arguments['repeats']} repeats"
    where = f"{machine['cpu']}, {machine['cores']} cores, {arguments['dtype']}"
    measured = f"Measured on {where}: {how}, interleaved; median and its 95 % interval."
    return f"{grid(rows)}\n\n{measured}"


def headline_table(results: dict[str, Any]) -> str:
    """Render the few figures that the README begins with, each with the command that makes it."""
    rows = [["figure", "measured", "by"]]
    if (record := _record("wan.json")) is not None:
        cells = {cell["name"]: cell["disciplines"]["default"] for cell in record["emulated"]}
        far = next(found for name, found in cells.items() if name.startswith("R80-d8-a0.8-s0"))
        what = "a drafter 80 ms from its verifier (emulated: d 8 ms, V 30 ms, a 0.8), times plain decoding"
        rows.append([what, interval(far["to_plain"]), "`make bench-wan`"])
        rows.append(["the same, times textbook speculation", interval(far["to_textbook"]), "`make bench-wan`"])
    if (record := _record("large.json")) is not None:
        drafted = {(line["weights"], line["place"]): line["to_off"] for line in record["lines"] if line["row"] != "off"}
        what = "half a billion random weights, a drafter beside them (a 0.8), times off"
        rows.append([what, interval(drafted["float32", "0 ms"]), "`make bench-large`"])
    if (record := _record("failover.json")) is not None:
        killed = {cell["where"]: cell["max_s"] for cell in record["cells"] if cell["fault"] == "SIGKILL"}
        parties = ("drafter", "verifier", "orchestrator")
        worst = ", ".join(f"{killed[party]:.2f}" for party in parties)
        what = f"longest wait for text, in s, where the {', the '.join(parties)} is killed"
        rows.append([what, worst, "`make bench-failover`"])
    if (record := _record("soak.json")) is not None:
        wrong = sum(bar["value"] for bar in record["bars"] if bar["name"] in ("lost", "repeated", "mismatches"))
        what = f"tokens lost, repeated or changed by {sum(record['faults'].values())} faults in 10 minutes"
        rows.append([what, f"{wrong:g} of {record['tokens']:,}", "`make soak`"])
    if (record := _record("batch.json")) is not None:
        bars = {bar["name"].partition(" (")[0]: bar for bar in record["bars"]}
        what = "16 sessions at once, drafting automatic, times off"
        rows.append([what, interval(bars["16 at once, automatic / off"]), "`make bench-batch`"])
    to = {row["key"]: row["to"]["a"] for row in results["rows"]}
    rows.append(["one session, times transformers' `generate`", interval(to["d"]), "`make bench`"])
    if "e-lookup" in to:
        what = "OpenVINO GenAI's prompt lookup (one process, no log), likewise"
        rows.append([what, interval(to["e-lookup"]), "`make bench`"])
    return grid(rows)


def _record(file: str) -> dict[str, Any] | None:
    """What a bench has written; None where it has not run."""
    path = RESULTS / file
    return json.loads(path.read_text()) if path.exists() else None


def copy_table(results: dict[str, Any]) -> str:
    """Render the rows of `make bench-copy`, each source's acceptance beside the speed, and what a look-up takes."""
    rows = [["who may propose", "tokens/s", "x plain", "tokens per forward", "accepted: drafter", "n-gram"]]
    for row in results["rows"]:
        accepted = ["" if share is None else f"{share:.2f}" for share in row["acceptance"].values()]
        speed = f"{row['tokens_per_second']['value']:.0f}"
        rows.append([row["label"], speed, interval(row["to_plain"]), f"{row['tokens_per_forward']:.2f}", *accepted])
    arguments, proposal = results["arguments"], results["bars"][-1]
    how = f"{arguments['prompts']} prompts x {arguments['tokens']} tokens, {arguments['repeats']} repeats, interleaved"
    return f"{grid(rows)}\n\n{how}; {arguments['dtype']}. Microseconds per proposal: {interval(proposal)}."


def batch_table(results: dict[str, Any]) -> str:
    """Render `make bench-batch`: rows, the verifier's work beside its forwards, requests that arrive, bars."""
    rows = [["at once", "row", "tokens/s", "x off", "while full", "ms between tokens, p50", "p95", "first token, ms"]]
    outside = [["at once", "row", "us between forwards, p50", "of each session", "forward, us", "share of the forward"]]
    for row in results["rows"]:
        speed = f"{row['tokens_per_second']['value']:.0f}"
        pauses = [f"{row['pause_p50_ms']:.1f}", f"{row['pause_p95_ms']:.1f}", f"{row['first_token_ms']:.0f}"]
        full = interval(row["full_to_off"]) if row.get("full_to_off") else ""
        rows.append([str(row["level"]), row["label"], speed, interval(row["to_off"]), full, *pauses])
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
    rows = [["at once", "temperature", "row", "tokens/s", "x off", "tokens per forward", "accepted by position"]]
    rows[0] += ["accepted of tested", "the head's share of the step"]
    for row in results["rows"]:
        accepted = " ".join(f"{share:.2f}" for share in row["accepted_at"])
        of_tested = ", ".join(f"{name} {hits}/{tests}" for name, (tests, hits) in row["sources"].items())
        share = "" if row["head_share"] is None else f"{row['head_share']:.0%}"
        place = [str(row["level"]), f"{row['temperature']:g}", row["label"]]
        speed = [f"{row['tokens_per_second']['value']:.0f}", interval(row["to_off"])]
        rows.append([*place, *speed, f"{row['tokens_per_forward']:.2f}", accepted, of_tested, share])
    machine, arguments = results["machine"], results["arguments"]
    how = f"{arguments['prompts']} held-out prompts x {arguments['tokens']} tokens, interleaved; {arguments['dtype']}"
    said = f"Measured on {machine['cpu']}, {machine['cores']} cores: {how}. {' '.join(results['notes'])}"
    return "\n\n".join([grid(rows), bars_table(results), said])


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


def constrained_table(results: dict[str, Any]) -> str:
    """Render the counts of `make bench-constrained`."""
    rows = [["constraint, rule", "positions", "only one id allowed", "right with the mask", "right without"]]
    for row in results["rows"]:
        shares = [f"{row[name] / row['positions']:.2f}" for name in ("forced", "with_mask", "without")]
        rows.append([f"{row['form']}, {row['rule']}", str(row["positions"]), *shares])
    return grid(rows)


def tools_table(results: dict[str, Any]) -> str:
    """Render the counts of `make bench-tools`."""
    counts = {"differing": "differ", "unparsable": "do not parse", "violating": "violate", "cut": "others in pieces"}
    rows = [["format", "calls", *counts.values(), "tokens/forward, drafting off", "on"]]
    for row in results["rows"]:
        forwards = (f"{row['tokens'] / (row[name] or 1):.2f}" for name in ("forwards_off", "forwards_on"))
        name = f"{row['form']}, {'sampled' if row['sampled'] else 'greedy'}"
        rows.append([name, str(row["calls"]), *(str(row[each]) for each in counts), *forwards])
    return "\n\n".join([grid(rows), bars_table(results)])


def gpu_table(results: dict[str, Any]) -> str:
    """Render what `make bench-gpu` measured, with the device's name."""
    steps = [["sessions", "positions of each", "ms per step", "floor, ms", "x floor"]]
    for step in results["steps"]:
        sizes = [str(step["rows"]), str(step["window"])]
        steps.append([*sizes, interval(step["ms"]), f"{step['floor_ms']:.2f}", interval(step["to_floor"])])
    speeds = [["row", "sessions", "tokens/s", "of each", "accepted"]]
    for line in results["speeds"]:
        accepted = "" if line["acceptance"] is None else f"{line['acceptance']:.2f}"
        of_each = f"{line['tokens_per_session']:.1f}"
        speeds.append([line["row"], str(line["sessions"]), interval(line["tokens_per_second"]), of_each, accepted])
    arguments, floor = results["arguments"], results["floor"]
    how = f"{arguments['target']}, drafter {arguments['draft']}, {arguments['dtype']}, prompt {arguments['prompt']}"
    compiled = "compiled" if results["compiled"] else "not compiled"
    where = f"{results['device']}, {compiled}: {how}; copies at {floor['bandwidth'] / 1e9:.0f} GB/s."
    parts = [grid(steps), grid(speeds), *([bars_table(results)] if results["bars"] else [])]
    return "\n\n".join([*parts, f"{where} {' '.join(results['notes'])}"])


def pair_table(figures: dict[str, Any]) -> str:
    """Render what `python -m demo_pair.train.evaluate` measured."""
    loss, acceptance = figures["held_out_loss"], figures["acceptance_first"]
    rows = [
        ["figure", "value"],
        ["held-out loss, target (nats per token)", f"{loss['target']:.3f}"],
        ["held-out loss, drafter (nats per token)", f"{loss['draft']:.3f}"],
        ["acceptance of the first proposed token, greedy", f"{acceptance['0.0']:.3f}"],
        ["acceptance of the first proposed token, temperature 0.8, coupled", f"{acceptance['0.8']:.3f}"],
        [f"completions of {figures['prompts']} held-out prompts that parse", f"{figures['parses']:.3f}"],
    ]
    return grid(rows)


def large_table(results: dict[str, Any]) -> str:
    """Render what a drafter gains for a target of a size that people run, by place and weights."""
    rows = [["weights", "place", "row", "tokens/s", "times off", "tokens per forward", "acceptance"]]
    for line in results["lines"]:
        accepted = "" if line["acceptance"] is None else f"{line['acceptance']:.2f}"
        told = [f"{line['tokens_per_second']['value']:.1f}", interval(line["to_off"])]
        rows.append([line["weights"], line["place"], line["row"], *told, f"{line['tokens_per_forward']:.2f}", accepted])
    machine, arguments = results["machine"], results["arguments"]
    how = f"{arguments['target']}, drafter {arguments['draft']}, planted acceptance {arguments['acceptance']:g}"
    size = f"{arguments['prompts']} prompts x {arguments['tokens']} tokens, {arguments['repeats']} repeats"
    measured = f"Measured on {machine['cpu']}, {machine['cores']} cores: {how}; {size}."
    return "\n\n".join([grid(rows), bars_table(results), measured])


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


def edges_table(results: dict[str, Any]) -> str:
    """Render what a lost verifier costs the edges that share it, what an edge costs, and the bars."""
    rows = [["edges", "sessions", "all back, s", "longest pause, s", "longest pause of a rolling update, s"]]
    for lost in (results["loss"], results["storm"]):
        pauses = (lost["back_s"], lost["pause_s"], lost["rolling_pause_s"])
        rows.append([str(lost["edges"]), str(lost["sessions"]), *(f"{pause:.2f}" for pause in pauses)])
    cost, machine = results["cost"], results["machine"]
    edge = f"{cost['idle_kib']:.0f} KiB at its verifier and {cost['idle_bytes']:.0f} bytes/s while it is idle"
    sent = f" and {cost['busy_bytes']:.0f} bytes/s" if "busy_bytes" in cost else ""  # not in older records
    said = f"An edge takes {edge}, {cost['busy_kib']:.0f} KiB{sent} while it is busy."
    where = f"Measured on {machine['cpu']}, {machine['cores']} cores, with emulated forwards."
    return f"{grid(rows)}\n\n{bars_table(results)}\n\n{said} {where}"


def hybrid_table(results: dict[str, Any]) -> str:
    """Render what drafting gains a target with recurrent layers, and what its kept states cost."""
    rows = [["row", "tokens/s", "times off", "tokens a forward"]]
    for line in results["lines"]:
        speed, ratio = line["tokens_per_second"]["value"], line["to_off"]
        label = {"a": "transformers"}.get(line["row"], line["row"])
        rows.append([label, f"{speed:.0f}", interval(ratio), f"{line['tokens_per_forward']:.2f}"])
    slot_bytes, machine = results["slot_bytes"], results["machine"]
    keys, states = (slot_bytes[part] / (1 << 20) for part in ("keys_and_values", "states"))
    slot = f"A slot has {keys:.1f} MiB of keys and values, {states:.1f} MiB of states."
    where = f"Measured on {machine['cpu']}, {machine['cores']} cores."
    return "\n\n".join([grid(rows), bars_table(results), " ".join([slot, *results["notes"], where])])


Render = Callable[[dict[str, Any]], str]
# By name: the record in bench/results, the command that makes it, and what renders it.
RECORDS: dict[str, tuple[str, str, Render]] = {
    "headline": ("main.json", "make bench", headline_table),
    "speed": ("main.json", "make bench", speed_table),
    "bars": ("main.json", "make bench", bars_table),
    "box": ("box.json", "make bench-box", speed_table),
    "box-bars": ("box.json", "make bench-box", bars_table),
    "step": ("step.json", "make bench-step", step_table),
    "batch": ("batch.json", "make bench-batch", batch_table),
    "heads": ("heads.json", "make bench-heads", heads_table),
    "heads-ordinary": ("heads_ordinary.json", "make bench-heads-ordinary", heads_table),
    "copy": ("copy.json", "make bench-copy", copy_table),
    "wan": ("wan.json", "make bench-wan", wan_table),
    "pairs": ("wan.json", "make bench-wan", pairs_table),
    "branching": ("branching.json", "python -m bench.wan.branching", branching_table),
    "placement": ("branching.json", "python -m bench.wan.branching", placement_table),
    "draft-rows": ("draft_rows.json", "python -m bench.draft_rows", draft_rows_table),
    "branch-bytes": ("wan.json", "make bench-wan", branch_bytes_table),
    "capacity": ("capacity.json", "make bench-capacity", capacity_table),
    "dtypes": ("dtypes.json", "make bench-dtypes", dtypes_table),
    "deterministic": ("deterministic.json", "make bench-deterministic", deterministic_table),
    "suffix": ("suffix.json", "make bench-suffix", suffix_table),
    "learn": ("learn.json", "make bench-learn", learn_table),
    "rag": ("rag.json", "make bench-rag", rag_table),
    "constrained": ("constrained.json", "make bench-constrained", constrained_table),
    "tools": ("tools.json", "make bench-tools", tools_table),
    "edges": ("edges.json", "make bench-edges", edges_table),
    "hybrid": ("hybrid.json", "make bench-hybrid", hybrid_table),
    "vllm": ("vllm.json", "make bench-vllm", vllm_table),
    "large": ("large.json", "make bench-large", large_table),
    "gpu": ("gpu.json", "make bench-gpu", gpu_table),
    "laws": ("laws.json", "make statistics", laws_table),
    "peers": ("laws_peers.json", "python -m bench.laws.peer", peers_table),
    "cluster": ("cluster.json", "make bench-cluster", cluster_table),
    "ingress": ("ingress.json", "make bench-ingress", ingress_table),
    "cluster-faults": ("cluster_faults.json", "make test-cluster", cluster_faults_table),
    "failover": ("failover.json", "make bench-failover", pauses_table),
    "played": ("faults.json", "make test-faults-all", played_line),
    "soak": ("soak.json", "make soak", soak_table),
    "soak-demo": ("soak_demo.json", "make soak-demo", soak_table),
    "soak-vllm": ("soak_vllm.json", "make soak-vllm", soak_table),
    "load": ("load.json", "make soak-load", load_table),
    "simulation": ("simulation.json", "make soak-sim", simulation_table),
    "fuzz": ("fuzz.json", "make fuzz MINUTES=30", fuzz_table),
    "pair": ("../../demo_pair/figures.json", "python -m demo_pair.train.evaluate", pair_table),
}
# Without a record: made from the tests themselves.
MADE: dict[str, Callable[[], str]] = {"matrix": matrix_table, "bounds": bounds_table, "tests": tests_table}
PLACES = {
    "headline": ROOT / "README.md",
    "bounds": ROOT / "docs" / "RELIABILITY.md",
    "pair": ROOT / "demo_pair" / "README.md",
}


def table(name: str) -> str:
    """Render the table of that name."""
    if name in MADE:
        return MADE[name]()
    file, command, render = RECORDS[name]
    record = _record(file)
    return f"Not recorded yet: `{command}`." if record is None else render(record)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    known = [*RECORDS, *MADE]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"tables to print: {', '.join(known)}")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--write", action="store_true", help="write those that stand in pages")
    mode.add_argument("--check", action="store_true", help="write nothing; exit 1 where one of those differs")
    asked = parser.parse_args(arguments)
    if unknown := [name for name in asked.names if name not in known]:
        parser.error(f"no table is named {', '.join(unknown)}; there are {', '.join(known)}")
    if asked.write or asked.check:
        return _keep(write=asked.write)
    print("\n\n".join(f"## {name}\n\n{table(name)}" for name in asked.names or known))
    return 0


def _keep(*, write: bool) -> int:
    """Write or check the tables that stand in pages; the exit code."""
    stale = 0
    for name, page in PLACES.items():
        have = page.read_text()
        want = with_table(have, name, "figures", table(name))
        if write:
            page.write_text(want)
        elif have != want:
            print(f"{page.name}: {name} differs from its source: run python -m scripts.figures --write")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
