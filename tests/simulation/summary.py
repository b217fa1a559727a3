"""What many seeds came to, for people: the end of `make soak-sim`, and the record of docs/SIMULATION.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def summary(results: Mapping[str, Any]) -> str:
    """results: as `tests.simulation.record` writes them."""
    failed, states = results["failed"], f"{results['states']} states"
    attempts = f"{results['attempts']} attempts after the first"
    which = f" ({', '.join(map(str, failed))})" if failed else ""
    told = {
        "simulated": f"{results['simulated_hours']} hours, {results['callbacks']} callbacks, {states}",
        "requests:": f"{results['requests']}, {results['tokens']} tokens, {attempts}",
        **{f"{name}:": _listed(results[name]) for name in ("faults", "ends", "reached")},
    }
    head = f"simulation: {results['seeds']} seeds in {results['took_s']:.0f} s, {len(failed)} failed{which}"
    return "\n".join([head, *(f"  {name} {text}" for name, text in told.items())])


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
