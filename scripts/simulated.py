"""Keeps the record of docs/SIMULATION.md equal to the recorded run of many seeds.

python -m scripts.simulated --write    put it in
python -m scripts.simulated --check    exit 1 if the one that is there differs
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.pages import asked_to_write, with_table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "SIMULATION.md"
RESULTS = ROOT / "bench" / "results" / "simulation.json"
UNRECORDED = "Not recorded yet in this form: `make soak-sim`."


def recorded(results: dict[str, Any]) -> str:
    """Render what was run, where, and what it came to."""
    machine, commit = results["machine"], results["commit"] or "no commit"
    changed = " and changes" if commit.endswith("+") else ""
    where = f"`make soak-sim` of commit {commit[:7]}{changed}, on one core of {machine['cpu']}:"
    return f"{where}\n\n```text\n{summary(results)}\n```"


def summary(results: Mapping[str, Any]) -> str:
    """What many seeds came to: also the end of `make soak-sim`. results: as `tests.simulation.record` writes them."""
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


def main() -> int:
    """Run the command line."""
    write = asked_to_write(__doc__)
    have = PAGE.read_text()
    record = recorded(json.loads(RESULTS.read_text())) if RESULTS.exists() else UNRECORDED
    want = with_table(have, "record", "simulated", record)
    if write:
        PAGE.write_text(want)
    elif have != want:
        print(f"{PAGE.name}: the record differs from {RESULTS.name}: run python -m scripts.simulated --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
