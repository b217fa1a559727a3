"""Cores in use by each process while each row ran: another process that is busy disturbs a row."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

CpuSeconds = Callable[[], float]


class CoreUse:
    """Call `ran` after each run. A clock gives the processor time that its process, and what is below it, has used."""

    def __init__(self, clocks: Mapping[str, CpuSeconds]) -> None:
        self._clocks = clocks
        self._used: dict[str, dict[str, float]] = {}
        self._elapsed: dict[str, float] = {}
        self._last_used = self._read()
        self._last = time.perf_counter()

    def ran(self, row: str) -> None:
        now, used = time.perf_counter(), self._read()
        row_used = self._used.setdefault(row, dict.fromkeys(used, 0.0))
        for name, seconds in used.items():
            row_used[name] += seconds - self._last_used[name]
        self._elapsed[row] = self._elapsed.get(row, 0.0) + now - self._last
        self._last, self._last_used = now, used

    def by_row(self) -> dict[str, dict[str, float]]:
        """Mean number of cores in use, by row and process."""
        return {
            row: {name: round(seconds / self._elapsed[row], 3) for name, seconds in used.items()}
            for row, used in self._used.items()
        }

    def _read(self) -> dict[str, float]:
        return {name: clock() for name, clock in self._clocks.items()}
