"""`python -m tests.simulation`: many seeds, with progress, a summary, and a small script for each that fails."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from tests.simulation.run import Outcome, run
from tests.simulation.scenario import random_scenario
from tests.simulation.shrink import report, shrunk

SHOWN_EVERY_S = 10.0
MOST_FAILURES = 5


def main() -> int:
    """Returns the exit code: 1 if something did not hold, or not all was run."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first one (default: %(default)s)")
    args = parser.parse_args()
    return soak(range(args.first, args.first + args.seeds))


def soak(seeds: range) -> int:
    """Ctrl-C ends it with the summary so far."""
    totals, began = Totals(), time.perf_counter()
    with suppress(KeyboardInterrupt):
        _soak(seeds, totals)
    print(totals.summary(time.perf_counter() - began), flush=True)
    return 1 if totals.failed or totals.runs < len(seeds) else 0


def _soak(seeds: range, totals: Totals) -> None:
    shown = time.perf_counter()
    for seed in seeds:
        outcome = run(random_scenario(seed))
        totals.add(outcome)
        if outcome.found:
            print(f"\nseed {seed}:\n{report(outcome, shrunk(outcome.scenario))}\n", flush=True)
            if totals.failed >= MOST_FAILURES:
                return
        if time.perf_counter() - shown > SHOWN_EVERY_S:
            shown = time.perf_counter()
            print(f"simulation: {totals.runs} of {len(seeds)} seeds, {totals.failed} failed", flush=True)


class Totals:
    def __init__(self) -> None:
        self.runs = self.failed = self.callbacks = self.checks = self.tokens = self.reconnections = 0
        self.seconds = 0.0
        self.ends: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.reached: Counter[str] = Counter()

    def add(self, outcome: Outcome) -> None:
        self.runs += 1
        self.failed += bool(outcome.found)
        self.callbacks += outcome.steps
        self.checks += outcome.checked
        self.seconds += outcome.seconds
        self.tokens += sum(len(heard.tokens) for heard in outcome.heard)
        self.reconnections += sum(max(0, heard.attempts - 1) for heard in outcome.heard)
        self.ends += outcome.ends
        self.reached += outcome.reached
        self.faults += Counter(fault.kind for fault in outcome.scenario.faults)

    def summary(self, took: float) -> str:
        return "\n".join(
            [
                f"simulation: {self.runs} seeds in {took:.0f} s, {self.failed} failed",
                f"  simulated {self.seconds / 3600:.1f} hours, {self.callbacks} callbacks, {self.checks} states",
                f"  {self.ends.total()} requests, {self.tokens} tokens, {self.reconnections} attempts after the first",
                f"  faults: {listed(self.faults)}",
                f"  ends: {listed(self.ends)}",
                f"  reached: {listed(self.reached)}",
            ]
        )


def listed(counts: Counter[str]) -> str:
    parts: Iterable[str] = (f"{name} {count}" for name, count in counts.most_common())
    return ", ".join(parts) or "none"


if __name__ == "__main__":
    sys.exit(main())
