"""The result of many seeds, and its form on disk (`bench/results/simulation.json`)."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.harness import machine
from bench.harness.interval import Estimate
from bench.harness.report import Bar, at_least, at_most
from scripts.figures.exact import simulation_summary
from tests.simulation.run import Outcome

# Where a whole run is kept, and of how many seeds that is, from 0 on.
OUT = Path(__file__).resolve().parents[2] / "bench" / "results" / "simulation.json"
WHOLE = 10_000


class Totals:
    """Of the seeds so far.

    asked: those that are to run, in so many `processes`. took: seconds until now, set by who looks at a clock.
    """

    def __init__(self, asked: range, processes: int = 1) -> None:
        self.asked = asked
        self.processes = processes
        self.failed: list[int] = []
        self.runs = self.callbacks = self.checks = self.tokens = self.reconnections = 0
        self.seconds = self.took = 0.0
        self.ends: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.reached: Counter[str] = Counter()
        self._ran_on, self._commit = machine.describe(), machine.commit()  # what runs, whatever is committed meanwhile

    def add(self, outcome: Outcome) -> None:
        self.runs += 1
        if outcome.found:
            self.failed.append(outcome.scenario.seed)
        self.callbacks += outcome.steps
        self.checks += outcome.checked
        self.seconds += outcome.seconds
        self.tokens += sum(len(answer.tokens) for answer in outcome.answers)
        self.reconnections += sum(max(0, answer.attempts - 1) for answer in outcome.answers)
        self.ends += outcome.ends
        self.reached += outcome.reached
        self.faults += Counter(fault.kind for fault in outcome.scenario.faults)

    @property
    def clean(self) -> bool:
        """All that was asked for was run, and nothing failed."""
        return not self.failed and self.runs == len(self.asked)

    @property
    def whole(self) -> bool:
        """As many seeds as are recorded were asked for. What failed is recorded, too."""
        return self.asked.start == 0 and len(self.asked) >= WHOLE

    @property
    def bars(self) -> list[Bar]:
        return [
            at_least("seeds", _just(self.runs), WHOLE),
            at_most("seeds that failed", _just(len(self.failed)), 0),
        ]

    def results(self) -> dict[str, Any]:
        """As JSON. simulated_hours: by the virtual clock; took_s: by the wall's."""
        return {
            "name": OUT.stem,
            "bars": [asdict(bar) for bar in self.bars],
            "seeds": self.runs,
            "failed": self.failed,
            "took_s": round(self.took, 1),
            "processes": self.processes,
            "simulated_hours": round(self.seconds / 3600, 1),
            "callbacks": self.callbacks,
            "states": self.checks,
            "requests": self.ends.total(),
            "tokens": self.tokens,
            "attempts": self.reconnections,
            "faults": dict(self.faults.most_common()),
            "ends": dict(self.ends.most_common()),
            "reached": dict(self.reached.most_common()),
            "machine": self._ran_on,
            "commit": self._commit,
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.results(), indent=1) + "\n")

    def shown(self) -> str:
        return simulation_summary(self.results())


def _just(value: float) -> Estimate:
    return Estimate(value, value, value, 1.0)
