"""Tables of drafting here and deciding there: over a line, by trees."""

from __future__ import annotations

from statistics import median
from typing import Any

from scripts.figures import grid, interval

COMPARED = ("plain", "textbook", "chain")
LIGHT, HEAVY = "-b0.02", "-b0.1"


def wan_table(results: dict[str, Any]) -> str:
    """Render the measured cells of `make bench-wan`, and the bars that it misses."""
    names = list(results["emulated"][0]["disciplines"])
    ratios = [f"default / {other}" for other in (*COMPARED, "optimum")]
    rows = [["tokens/s", *names, *ratios, "simulator off by"]]
    for cell in results["emulated"]:
        error = max(one["value"] for one in cell["simulator_error"].values())
        rows.append([cell["name"], *_wan_row(cell, names), interval(cell["default_to_optimum"]), f"{error:.0%}"])
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
        rows.append([f"`{one['rule']}`{', trees' if one['trees'] else ''}", *cells])
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
    """Render what trees gain over chains, beside what is simulated."""
    cells = {cell["name"]: cell for cell in results["emulated"]}
    rows = [["cell", "default / chain", "simulated", "with b 0.10", "simulated"]]
    for name, light in cells.items():
        if not name.endswith(LIGHT):
            continue
        heavy = cells.get(name.removesuffix(LIGHT) + HEAVY)
        told = [text for cell in (light, heavy) for text in (_gain(cell) if cell else ("", ""))]
        rows.append([name.removesuffix(LIGHT), *told])
    return grid(rows)


def _gain(cell: dict[str, Any]) -> tuple[str, str]:
    simulated = cell["simulated"]
    return _default_to(cell, "chain"), f"{simulated['default'] / simulated['chain']:.2f}"


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
