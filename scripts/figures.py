"""Keeps the tables of figures in README.md, docs/ and demo_pair/README.md equal to the recorded results.

python -m scripts.figures --write    put them in
python -m scripts.figures --check    exit 1 if one that is there differs
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from scripts.cluster_figures import cluster_faults_table, cluster_table, ingress_table
from scripts.exact_figures import deterministic_table, dtypes_table, laws_table, peers_table
from scripts.pages import asked_to_write, grid, interval, with_table

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench" / "results" / "main.json"
WAN = ROOT / "bench" / "results" / "wan.json"
COPY = ROOT / "bench" / "results" / "copy.json"
BATCH = ROOT / "bench" / "results" / "batch.json"
CONSTRAINED = ROOT / "bench" / "results" / "constrained.json"
LAWS = ROOT / "bench" / "results" / "laws.json"
PEERS = ROOT / "bench" / "results" / "laws_peers.json"
DETERMINISTIC = ROOT / "bench" / "results" / "deterministic.json"
DTYPES = ROOT / "bench" / "results" / "dtypes.json"
GPU = ROOT / "bench" / "results" / "gpu.json"
CLUSTER = ROOT / "bench" / "results" / "cluster.json"
INGRESS = ROOT / "bench" / "results" / "ingress.json"
CLUSTER_FAULTS = ROOT / "bench" / "results" / "cluster_faults.json"
STEP = ROOT / "bench" / "results" / "step.json"
PAIR = ROOT / "demo_pair" / "figures.json"


def speed_table(results: dict[str, Any]) -> str:
    """Render the rows of `make bench`: median and 95 % interval over the repeats."""
    rows = [["row", "tokens/s", "x transformers", "x assisted", "tokens per forward", "acceptance"]]
    for row in results["rows"]:
        accepted = "" if row["acceptance"] is None else f"{row['acceptance']:.2f}"
        to = row["to"]
        rows.append(
            [
                f"({row['key']}) {row['label']}",
                f"{row['tokens_per_second']['value']:.0f}",
                interval(to["a"]),
                interval(to["b"]),
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
    if WAN.exists():
        cells = {cell["name"]: cell["disciplines"]["default"] for cell in json.loads(WAN.read_text())["emulated"]}
        far = cells["R80-d8-a0.8-s0"]
        what = "a drafter 80 ms from its verifier (emulated devices: d 8 ms, V 30 ms, a 0.8)"
        rows.append([f"{what}, times plain decoding", interval(far["to_plain"]), "`make bench-wan`"])
        rows.append(
            ["the same, times textbook speculation at its best k", interval(far["to_textbook"]), "`make bench-wan`"]
        )
    if BATCH.exists():
        bars = {bar["name"].partition(" (")[0]: bar for bar in json.loads(BATCH.read_text())["bars"]}
        what = "16 sessions at once, drafting automatic, times drafting off (forwards by OpenVINO)"
        rows.append([what, interval(bars["16 at once, automatic / off"]), "`make bench-batch`"])
        what = "the same, times the better of transformers' static and continuous batches"
        rows.append([what, interval(bars["16 at once, automatic / the better peer"]), "`make bench-batch`"])
    if COPY.exists():
        both = next(row for row in json.loads(COPY.read_text())["rows"] if row["label"] == "both")
        what = "prompts that ask for a copy, drafting on, times off"
        rows.append([what, interval(both["to_plain"]), "`make bench-copy`"])
    to = {row["key"]: row["to"]["a"] for row in results["rows"]}
    rows.append(["one session, drafting on, times transformers' `generate`", interval(to["d"]), "`make bench`"])
    rows.append(["the same, drafting off", interval(to["c"]), "`make bench`"])
    if "e-lookup" in to:
        what = "OpenVINO GenAI's prompt lookup, in one process, times transformers' `generate`"
        rows.append([what, interval(to["e-lookup"]), "`make bench`"])
    return grid(rows)


def bars_table(results: dict[str, Any]) -> str:
    """Render every bar of `make bench`, those that do not hold too."""
    rows = [["bar", "measured", "needed", "holds"]]
    for bar in results["bars"]:
        needed = f"{bar['sense']} {bar['needed']:g}"
        rows.append([bar["name"], interval(bar), needed, "yes" if bar["holds"] else "**no**"])
    return grid(rows)


def wan_table(results: dict[str, Any]) -> str:
    """Render the measured cells and round trips of `make bench-wan`, and the bars that it misses."""
    names = ["plain", "textbook", "stream, waiting", "default"]
    rows = [["tokens/s", *names, "default / plain", "default / textbook", "default / optimum", "simulator off by"]]
    for cell in results["emulated"]:
        error = max(one["value"] for one in cell["simulator_error"].values())
        rows.append([cell["name"], *_wan_row(cell, names), interval(cell["default_to_optimum"]), f"{error:.0%}"])
    for line in results["demo_pair"]:
        rows.append([f"demo pair, {line['rtt_ms']:g} ms", *_wan_row(line, names), "", ""])
    bars = results["bars"]
    missed = [bar for bar in bars if not bar["holds"]]
    parts = [grid(rows), _simulator(results), _bytes(results)]
    said = [f"{len(bars) - len(missed)} of {len(bars)} bars hold."]
    said += [f"- missed: {bar['name']}: {interval(bar)}, needed {bar['sense']} {bar['needed']:g}" for bar in missed]
    return "\n\n".join([*parts, "\n".join(said)])


def _simulator(results: dict[str, Any]) -> str:
    """Say how far the simulator is from what was measured."""
    names = results["emulated"][0]["simulator_error"]
    errors = {name: [cell["simulator_error"][name]["value"] for cell in results["emulated"]] for name in names}
    said = ", ".join(f"{name} {median(each):.1%} (at most {max(each):.1%})" for name, each in errors.items())
    return f"The simulator, told what software adds, is off by, median over {len(results['emulated'])} cells: {said}."


def _bytes(results: dict[str, Any]) -> str:
    """Render bytes per proposed and per decided token, a hop a column."""
    names = [hop["name"] for hop in results["wire"][0]["hops"]]
    rows = [["bytes per proposed / per decided token", *names]]
    for one in results["wire"]:
        cells = []
        for hop in one["hops"]:
            proposed = hop["bytes_per_proposed_token"]
            cells.append(f"{f'{proposed:.1f} / ' if proposed else ''}{hop['bytes_per_decided_token']:.1f}")
        rows.append([f"`{one['rule']}`", *cells])
    return grid(rows)


def pairs_table(results: dict[str, Any]) -> str:
    """Render what each emulated pair of `make bench-wan` gained over plain decoding, those that gained most first."""
    rows = [["d / V", "a", "growth of V per position", "R, ms", "x plain", "x textbook"]]
    cells = sorted(results["emulated"], key=lambda cell: -cell["disciplines"]["default"]["to_plain"]["value"])
    for measured in cells:
        cell, default = measured["cell"], measured["disciplines"]["default"]
        ratio = f"{cell['draft_ms']:g} / {cell['V_ms']:g}"
        shares = [f"{cell['acceptance']:g}", f"{cell['slope']:.0%}", f"{cell['rtt_ms']:g}"]
        rows.append([ratio, *shares, interval(default["to_plain"]), interval(default["to_textbook"])])
    how = "`make bench-wan`: emulated devices (forwards are sleeps), real processes, sockets, scheduler and log"
    return f"{grid(rows)}\n\n{how}; median and its 95 % interval."


def _wan_row(measured: dict[str, Any], names: list[str]) -> list[str]:
    found = measured["disciplines"]
    speeds = [f"{found[name]['tokens_per_second']['value']:.1f}" for name in names]
    return [*speeds, interval(found["default"]["to_plain"]), interval(found["default"]["to_textbook"])]


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
    rows = [["at once", "row", "tokens/s", "x off", "ms between tokens, p50", "p95", "first token, ms"]]
    outside = [["at once", "row", "us between forwards, p50", "of each session", "forward, us", "share of the forward"]]
    for row in results["rows"]:
        speed = f"{row['tokens_per_second']['value']:.0f}"
        pauses = [f"{row['pause_p50_ms']:.1f}", f"{row['pause_p95_ms']:.1f}", f"{row['first_token_ms']:.0f}"]
        rows.append([str(row["level"]), row["label"], speed, interval(row["to_off"]), *pauses])
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


TABLES: list[tuple[Path, str, Path, Callable[[dict[str, Any]], str]]] = [
    (ROOT / "README.md", "headline", BENCH, headline_table),
    (ROOT / "docs" / "PERFORMANCE.md", "speed", BENCH, speed_table),
    (ROOT / "docs" / "PERFORMANCE.md", "bars", BENCH, bars_table),
    (ROOT / "docs" / "PERFORMANCE.md", "step", STEP, step_table),
    (ROOT / "docs" / "PERFORMANCE.md", "wan", WAN, wan_table),
    (ROOT / "docs" / "CHOOSING_A_PAIR.md", "pairs", WAN, pairs_table),
    (ROOT / "docs" / "PERFORMANCE.md", "copy", COPY, copy_table),
    (ROOT / "docs" / "PERFORMANCE.md", "batch", BATCH, batch_table),
    (ROOT / "docs" / "PERFORMANCE.md", "gpu", GPU, gpu_table),
    (ROOT / "docs" / "CONSTRAINED.md", "constrained", CONSTRAINED, constrained_table),
    (ROOT / "docs" / "EXACTNESS.md", "laws", LAWS, laws_table),
    (ROOT / "docs" / "EXACTNESS.md", "peers", PEERS, peers_table),
    (ROOT / "docs" / "MODELS.md", "deterministic", DETERMINISTIC, deterministic_table),
    (ROOT / "docs" / "MODELS.md", "dtypes", DTYPES, dtypes_table),
    (ROOT / "docs" / "SCALE.md", "cluster", CLUSTER, cluster_table),
    (ROOT / "docs" / "DEPLOY.md", "ingress", INGRESS, ingress_table),
    (ROOT / "docs" / "DEPLOY.md", "cluster faults", CLUSTER_FAULTS, cluster_faults_table),
    (ROOT / "demo_pair" / "README.md", "pair", PAIR, pair_table),
]


def main() -> int:
    """Run the command line."""
    write = asked_to_write(__doc__)
    stale = 0
    for page, name, source, render in TABLES:
        if not source.exists():  # not measured yet
            continue
        have = page.read_text()
        want = with_table(have, name, "figures", render(json.loads(source.read_text())))
        if write:
            page.write_text(want)
        elif have != want:
            print(f"{page.name}: the figures differ from {source.name}: run python -m scripts.figures --write")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
