"""The tables of `make bench-cluster` and `make test-cluster`."""

from typing import Any

from scripts.figures.markdown import grid, interval


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


def cluster_faults_table(results: dict[str, Any]) -> str:
    """Render how long text paused in each fault of `make test-cluster`."""
    rows = [["what happens under load", "longest wait for a chunk before, s", "from then on, s", "until Ray knew, s"]]
    for each in results["faults"]:
        ray = "" if each["ray_s"] is None else f"{each['ray_s']:.2f}"
        rows.append([each["fault"], f"{each['usual_s']:.2f}", f"{each['pause_s']:.2f}", ray])
    machine = results["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores for all nodes"
    return f"{grid(rows)}\n\nSeen once, on {where}; a step of the emulated target takes 0.25 s."
