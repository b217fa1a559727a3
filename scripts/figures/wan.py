"""Tables of drafting here and deciding there: over a line, by trees and placements."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

from scripts.figures.markdown import grid, interval
from scripts.pages import ROOT

RESULTS = ROOT / "bench" / "results"
COMPARED = ("plain", "textbook", "chain")
LIGHT, HEAVY = "-b0.02", "-b0.1"


def wan_table(results: dict[str, Any]) -> str:
    """Render the measured cells and round trips of `make bench-wan`, and the bars that it misses."""
    names = list(results["emulated"][0]["disciplines"])
    # Earlier records have no other optimum than that of chains.
    both = "optimum_of_chains" in results["emulated"][0]
    optimum = "default / optimum" if both else "default / optimum of chains"
    rows = [["tokens/s", *names, *(f"default / {other}" for other in COMPARED), optimum, "simulator off by"]]
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
    all_errors = [cell["simulator_error"] for cell in results["emulated"]]
    errors = {name: [found[name]["value"] for found in all_errors if name in found] for name in names}
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
        rows.append([f"`{one['rule']}`{', trees' if one.get('trees') else ''}", *cells])
    return grid(rows)


def pairs_table(results: dict[str, Any]) -> str:
    """Render what each emulated pair of `make bench-wan` gained over plain decoding, those that gained most first."""
    rows = [["d / V", "a", "growth of V per position", "R, ms", "x plain", "x textbook"]]
    cells = sorted(results["emulated"], key=lambda cell: -cell["disciplines"]["default"]["to_plain"]["value"])
    for measured in cells:
        cell = measured["cell"]
        ratio = f"{cell['draft_ms']:g} / {cell['V_ms']:g}"
        shares = [f"{cell['acceptance']:g}", f"{cell['slope']:.0%}", f"{cell['rtt_ms']:g}"]
        rows.append([ratio, *shares, *(_default_to(measured, other) for other in ("plain", "textbook"))])
    how = "`make bench-wan`: emulated devices (forwards are sleeps), real processes, sockets, scheduler and log"
    return f"{grid(rows)}\n\n{how}; median and its 95 % interval."


def _wan_row(measured: dict[str, Any], names: list[str]) -> list[str]:
    found = measured["disciplines"]
    speeds = [f"{found[name]['tokens_per_second']['value']:.1f}" if name in found else "" for name in names]
    return [*speeds, *(_default_to(measured, other) for other in COMPARED)]


def _default_to(measured: dict[str, Any], other: str) -> str:
    """Nothing where the other one was not measured."""
    found = measured["disciplines"]["default"].get(f"to_{other}")
    return interval(found) if found else ""


def branching_table(results: dict[str, Any]) -> str:
    """Render what trees gain over chains: measured by `make bench-wan`, beside what was simulated before."""
    wan = json.loads((RESULTS / "wan.json").read_text())
    measured = {cell["name"]: cell for cell in wan["emulated"]}
    gains = {cell["name"]: cell["gain"] for cell in results["cells"]}
    rows = [["cell", "default / chain", "simulated", "with b 0.10", "simulated"]]
    for name in gains:
        if not name.endswith(LIGHT) or name not in measured:
            continue
        heavy = name.removesuffix(LIGHT) + HEAVY
        found = [_default_to(measured[each], "chain") if each in measured else "" for each in (name, heavy)]
        light, heavier = (f"{gains[each]:.2f}" for each in (name, heavy))
        rows.append([name.removesuffix(LIGHT), found[0], light, found[1], heavier])
    return grid(rows)


def draft_rows_table(results: dict[str, Any]) -> str:
    """Render what a forward of the demo drafter takes by the tokens that it extends."""
    found = results["ms"]
    rows = [
        ["tokens that a forward extends", *found],
        ["ms", *(f"{median(each):.2f}" for each in found.values())],
        ["times one", *(f"{_to_one(each, found['1']):.2f}" for each in found.values())],
    ]
    arguments, machine = results["arguments"], results["machine"]
    said = (
        f"{machine['cpu']}, {arguments['threads']} thread, {arguments['dtype']}, behind {arguments['length']} tokens."
    )
    return f"{grid(rows)}\n\n{said}"


def _to_one(found: list[float], one: list[float]) -> float:
    return median(each / first for each, first in zip(found, one, strict=True))


def branch_bytes_table(results: dict[str, Any]) -> str:
    """Render the bytes that proposals take per decided token, of chains and of trees, by rule."""
    hops = ("drafter to orchestrator", "orchestrator to verifier")
    rows = [["bytes of proposals per decided token", *(f"{hop}, {kind}" for hop in hops for kind in ("chain", "tree"))]]
    taken = {(one["rule"], one["trees"]): _proposals(one) for one in results["wire"]}
    for rule in dict.fromkeys(rule for rule, _ in taken):
        chains, trees = taken[rule, False], taken.get((rule, True))
        told = [(f"{chains[hop]:.0f}", f"{trees[hop]:.0f}" if trees else "chains only") for hop in hops]
        rows.append([f"`{rule}`", *(each for pair in told for each in pair)])
    return grid(rows)


def _proposals(one: dict[str, Any]) -> dict[str, float]:
    return {hop["name"]: hop["bytes"].get("proposals", 0.0) / one["decided"] for hop in one["hops"]}


def placement_table(results: dict[str, Any]) -> str:
    """Render where a drafter with trees is as fast as textbook speculation in the verifier's box."""
    rtts = [f"{float(rtt):g}" for rtt in results["placements"][0]["by_rtt"]]
    rows = [["drafter", "textbook, 0 ms", *(f"{rtt} ms" for rtt in rtts), "as fast at"]]
    for one in results["placements"]:
        speeds = [f"{speed:.0f}" for speed in (one["textbook"], *one["by_rtt"].values())]
        reach = ", ".join(f"{begins:.0f} to {ends:.0f} ms" for begins, ends in one["as_fast_ms"]) or "nowhere"
        rows.append([f"d {one['draft_ms']:g} ms, a {one['acceptance']:g}", *speeds, reach])
    return grid(rows)
