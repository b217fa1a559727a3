"""What runs of tests came to, and their forms on disk: of the failover matrix, of what runs on vLLM.

`make test-faults-all` writes `bench/results/faults.json`, `make test-vllm` `bench/results/vllm_tests.json`.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from bench.harness import machine
from bench.harness.report import Bar, at_least, exactly, none_of
from bench.vllm import server
from tests.faults.matrix import CELLS

# The tests that play a row of the matrix, by whose texts.
ROWS = {
    "the scripted model": "tests/faults/test_matrix.py::test_a_fault[",
    "the demo pair": "tests/faults/test_demo_pair.py::test_a_fault[",
}
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a test ended. seconds: that it took; the first of a module has set up what all of the module share."""

    end: str
    seconds: float


class Playing:
    """A plugin of pytest: notes how each test ends, and writes that once the run is over.

    results: what to write, as JSON, from how each test ended, by its id, and how many tests there were to run.
    """

    def __init__(self, out: Path, results: Callable[[Mapping[str, Ended], int], dict[str, object]]) -> None:
        self._out, self._results = out, results
        self._ran_on, self._commit = machine.describe(), machine.commit()  # what runs, whatever is committed meanwhile
        self._began = time.monotonic()
        self._asked = 0
        self._ends: dict[str, str] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Workers collect for themselves: where there are any, nothing is counted here."""
        self._asked = len(session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called after a test's set-up, itself, and what is done behind it: the worst of them counts."""
        self._seconds[report.nodeid] += report.duration
        if report.when == "call" or report.outcome != PASSED:
            before = self._ends.get(report.nodeid)
            self._ends[report.nodeid] = FAILED if before == FAILED else report.outcome

    def pytest_sessionfinish(self) -> None:
        minutes = round((time.monotonic() - self._began) / 60, 1)
        ends = {test: Ended(end, self._seconds[test]) for test, end in self._ends.items()}
        told = {**self._results(ends, self._asked), "minutes": minutes, "machine": self._ran_on, "commit": self._commit}
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(told, indent=1) + "\n")


def of_matrix(ends: Mapping[str, Ended], _asked: int) -> dict[str, object]:
    """The rows of the failover matrix that hold, and all tests beside them."""
    by_end = _by_end(ends)
    rows = {of: sum(test.startswith(prefix) for test in by_end[PASSED]) for of, prefix in ROWS.items()}
    hold = [at_least(f"rows that hold with {of}", exactly(count), len(CELLS)) for of, count in rows.items()]
    return {
        "name": "faults",
        "bars": [asdict(bar) for bar in (*hold, *_bars(by_end))],
        "rows": rows,
        "tests": len(by_end[PASSED]),
        "failed": by_end[FAILED],
        "skipped": by_end[SKIPPED],
    }


def of_vllm(ends: Mapping[str, Ended], asked: int) -> dict[str, object]:
    """Every test, and the versions that ran. A run that was stopped has fewer tests that hold than it should."""
    by_end = _by_end(ends)
    hold = at_least("tests that hold", exactly(len(by_end[PASSED])), asked)
    return {
        "name": "vllm_tests",
        "bars": [asdict(bar) for bar in (hold, *_bars(by_end))],
        "tests": [{"test": test, "end": ended.end, "seconds": round(ended.seconds, 1)} for test, ended in ends.items()],
        "vllm": server.versions(),
    }


def _by_end(ends: Mapping[str, Ended]) -> dict[str, list[str]]:
    return {end: sorted(test for test, how in ends.items() if how.end == end) for end in (PASSED, FAILED, SKIPPED)}


def _bars(by_end: Mapping[str, list[str]]) -> list[Bar]:
    return [none_of("tests that failed", len(by_end[FAILED])), none_of("tests left out", len(by_end[SKIPPED]))]
