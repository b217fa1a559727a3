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
from typing import Any

from scripts.figures import grid, interval, with_table
from scripts.figures.exact import changed_table, fuzz_table, laws_table, peers_table, reference_table, simulation_table
from scripts.figures.reliability import (
    bounds_table,
    cluster_faults_table,
    conformance_table,
    load_table,
    matrix_table,
    pauses_table,
    played_line,
    ran_table,
    soak_table,
    tests_table,
)
from scripts.figures.speed import (
    cluster_table,
    gpu_table,
    stack_table,
    vllm_table,
)
from scripts.figures.wan import (
    branch_bytes_table,
    branching_table,
    pairs_table,
    wan_table,
)
from scripts.pages import ROOT
from specwire.core.session import TRANSITIONS, State

RESULTS = ROOT / "bench" / "results"


def headline_table(results: dict[str, Any]) -> str:
    """Render the few figures that the README begins with, each with the command that makes it."""
    rows = [["figure", "measured", "by"]]
    if (record := _record("wan.json")) is not None:
        cells = {cell["name"]: cell["disciplines"]["default"] for cell in record["emulated"]}
        far = next(found for name, found in cells.items() if name.startswith("R80-d8-a0.8-s0"))
        what = "a drafter 80 ms from its verifier (emulated: d 8 ms, V 30 ms, a 0.8), times plain decoding"
        rows.append([what, interval(far["to_plain"]), "`make bench-wan`"])
        rows.append(["the same, times textbook speculation", interval(far["to_textbook"]), "`make bench-wan`"])
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
        found = {(row["row"], row["level"], row["temperature"]): row for row in record["rows"]}
        for drawn, said in ((0.0, "greedy"), (0.8, "at temperature 0.8")):
            what = f"16 sessions at once, {said}, drafting automatic, times off"
            rows.append([what, interval(found["default, no head", 16, drawn]["to_off"]), "`make bench-batch`"])
    to = {row["row"]: row["to"].get("transformers") for row in results["rows"] if not row["temperature"]}
    rows.append(["one session, times transformers' `generate`", interval(to["default, no head"]), "`make bench`"])
    if lookup := to.get("OpenVINO GenAI, prompt lookup"):
        what = "OpenVINO GenAI's prompt lookup (one process, no log), likewise"
        rows.append([what, interval(lookup), "`make bench`"])
    return grid(rows)


def real_table(results: dict[str, Any]) -> str:
    """Render what guesses from a real model's own text gain: times off, and times other servers' plain decoding."""
    found = {row["temperature"]: row for row in results["rows"] if row["row"] == "texts" and row["level"] == 1}
    rows = [["tokens/s divided by", *("at 0.8" if drawn else "greedy" for drawn in found)]]
    rows.append(["no drafting (off)", *(interval(row["to_off"]) for row in found.values())])
    for peer, named in {"llama.cpp": "llama.cpp's server", "OpenVINO GenAI": "OpenVINO GenAI"}.items():
        rows.append([f"{named}, plain", *(interval(row["to"][peer]) for row in found.values())])
    return grid(rows)


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


def _record(file: str) -> dict[str, Any] | None:
    """What a bench has written; None where it has not run."""
    path = RESULTS / file
    return json.loads(path.read_text()) if path.exists() else None


def states_table() -> str:
    """Render `specwire.core.session.TRANSITIONS`: a row for each event, a column for each state."""
    rows = [["event \\ state", *State]]
    for event, transitions in TRANSITIONS.items():
        led = [transitions.get(state, frozenset()) for state in State]
        rows.append([event.__name__, *(" or ".join(state for state in State if state in to) for to in led)])
    return grid(rows)


Render = Callable[[dict[str, Any]], str]
# By name: the record in bench/results, the command that makes it, and what renders it.
RECORDS: dict[str, tuple[str, str, Render]] = {
    "headline": ("main.json", "make bench", headline_table),
    "main": ("main.json", "make bench", stack_table),
    "main-ordinary": ("main_ordinary.json", "make bench-ordinary", stack_table),
    "box": ("box.json", "make bench-box", stack_table),
    "box-ordinary": ("box_ordinary.json", "make bench-box-ordinary", stack_table),
    "batch": ("batch.json", "make bench-batch", stack_table),
    "batch-ordinary": ("batch_ordinary.json", "make bench-batch-ordinary", stack_table),
    "heads": ("heads.json", "make bench-heads", stack_table),
    "heads-ordinary": ("heads_ordinary.json", "make bench-heads-ordinary", stack_table),
    "real": ("real_smollm2-135m.json", "make bench-real", real_table),
    "real-smollm2-135m": ("real_smollm2-135m.json", "make bench-real", stack_table),
    "real-qwen2.5-coder-1.5b": ("real_qwen2.5-coder-1.5b.json", "make bench-real", stack_table),
    "exact": ("exact_smollm2-135m.json", "make bench-exact", changed_table),
    "reference": ("reference_smollm2-135m.json", "make bench-reference", reference_table),
    "wan": ("wan.json", "make bench-wan", wan_table),
    "pairs": ("wan.json", "make bench-wan", pairs_table),
    "branching": ("wan.json", "make bench-wan", branching_table),
    "branch-bytes": ("wan.json", "make bench-wan", branch_bytes_table),
    "vllm": ("vllm.json", "make bench-vllm", vllm_table),
    "gpu": ("gpu.json", "make bench-gpu", gpu_table),
    "laws": ("laws.json", "make statistics", laws_table),
    "laws-vllm": ("laws_vllm.json", "make statistics-vllm", laws_table),
    "peers": ("laws_peers.json", "python -m bench.laws.peer", peers_table),
    "cluster": ("cluster.json", "make bench-cluster", cluster_table),
    "cluster-faults": ("cluster_faults.json", "make test-cluster", cluster_faults_table),
    "failover": ("failover.json", "make bench-failover", pauses_table),
    "played": ("faults.json", "make test-faults-all", played_line),
    "vllm-tests": ("vllm_tests.json", "make test-vllm", ran_table),
    "soak": ("soak.json", "make soak", soak_table),
    "soak-demo": ("soak_demo.json", "make soak PAIR=demo", soak_table),
    "soak-vllm": ("soak_vllm.json", "make soak PAIR=vllm", soak_table),
    "load": ("load.json", "make soak-load", load_table),
    "simulation": ("simulation.json", "make soak-sim", simulation_table),
    "fuzz": ("fuzz.json", "make fuzz MINUTES=30", fuzz_table),
    "conformance": ("conformance.json", "make conformance", conformance_table),
    "pair": ("../../demo_pair/figures.json", "python -m demo_pair.train.evaluate", pair_table),
}
# Without a record: made from the tests themselves, and from the core.
MADE: dict[str, Callable[[], str]] = {
    "matrix": matrix_table,
    "bounds": bounds_table,
    "tests": tests_table,
    "states": states_table,
}
PLACES = {
    "headline": ROOT / "README.md",
    "real": ROOT / "README.md",
    "bounds": ROOT / "docs" / "RELIABILITY.md",
    "conformance": ROOT / "docs" / "HTTP.md",
    "pair": ROOT / "demo_pair" / "README.md",
    "states": ROOT / "proto" / "PROTOCOL.md",
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
    parser = argparse.ArgumentParser(
        prog="python -m scripts.figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
        want = with_table(have, name, table(name))
        if write:
            page.write_text(want)
        elif have != want:
            print(f"{page.name}: {name} differs from its source: run python -m scripts.figures --write")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
