"""What a run of `make test-faults-all` has played, and its form on disk (`bench/results/faults.json`)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.harness import machine
from bench.harness.interval import Estimate
from bench.harness.report import Bar, at_least, at_most
from tests.faults.matrix import CELLS

# The tests that play a row of the matrix, by whose texts.
ROWS = {
    "the scripted model": "tests/faults/test_matrix.py::test_a_fault[",
    "the demo pair": "tests/faults/test_demo_pair.py::test_a_fault[",
}
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


class Playing:
    """A plugin of pytest: notes how each test ends, and writes that once the run is over."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._ran_on, self._commit = machine.describe(), machine.commit()  # what runs, whatever is committed meanwhile
        self._began = time.monotonic()
        self._ends: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called after a test's set-up, itself, and what is done behind it: the worst of them counts."""
        if report.when == "call" or report.outcome != PASSED:
            before = self._ends.get(report.nodeid)
            self._ends[report.nodeid] = FAILED if before == FAILED else report.outcome

    def pytest_sessionfinish(self) -> None:
        minutes = round((time.monotonic() - self._began) / 60, 1)
        told = {**results(self._ends), "minutes": minutes, "machine": self._ran_on, "commit": self._commit}
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(told, indent=1) + "\n")


def results(ends: Mapping[str, str]) -> dict[str, object]:
    """As JSON. ends: how each test ended, by its id."""
    by_end = {end: sorted(test for test, how in ends.items() if how == end) for end in (PASSED, FAILED, SKIPPED)}
    rows = {of: sum(test.startswith(prefix) for test in by_end[PASSED]) for of, prefix in ROWS.items()}
    return {
        "name": "faults",
        "bars": [asdict(bar) for bar in _bars(rows, by_end)],
        "rows": rows,
        "tests": len(by_end[PASSED]),
        "failed": by_end[FAILED],
        "skipped": by_end[SKIPPED],
    }


def _bars(rows: Mapping[str, int], by_end: Mapping[str, list[str]]) -> list[Bar]:
    return [
        *(at_least(f"rows that hold with {of}", _just(count), len(CELLS)) for of, count in rows.items()),
        at_most("tests that failed", _just(len(by_end[FAILED])), 0),
        at_most("tests left out", _just(len(by_end[SKIPPED])), 0),
    ]


def _just(value: float) -> Estimate:
    return Estimate(value, value, value, 1.0)
