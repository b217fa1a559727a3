"""The resident and the held memory of a load's processes, and whether it grows: a slope with an interval.

A leak keeps something of each ended session, so memory is plotted over the number of ended sessions. Successive samples
are correlated, and memory moves in steps; a straight line's usual interval would be far too narrow. So the later two
thirds of the run are cut into blocks, each represented by its median. The slope is the median of the slopes between any
two blocks, with its distribution-free interval (Theil, 1950; Sen, 1968).

The bound is below the least record of a session that anything could keep: its id (81 bytes), a prompt of 16 tokens
(168), parameters and times, and the objects and tables around them, some 600 bytes in all; a whole session is tens of
KiB. A share of all memory would say less: a slow service could leak what a fast one may not, and leaks that a short run
does not show would pass. Resident memory varies by more than ten minutes of such a leak; held memory
(`bench.soak.weighing`) does not.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from pathlib import Path

import redis

from bench.harness.interval import Estimate
from bench.harness.runs import BenchError
from bench.harness.services import Process, RedisLog
from bench.soak.weighing import weigh

BLOCKS = 12
# Two-sided 95 % of a normal law.
SIGMAS = 1.96
# Bytes that may stay of a session that has ended.
MOST_KEPT = 512.0


@dataclass(frozen=True, slots=True)
class Point:
    """ended: sessions until then. mib: memory, held or resident."""

    ended: float
    mib: float


def kept_bytes(points: Sequence[Point]) -> Estimate:
    """Bytes that each ended session leaves behind, over the later two thirds of a run.

    Raises:
        ValueError: fewer than two sessions ended in it, or there are too few samples.
    """
    late = blocks(points[len(points) // 3 :])
    slopes = sorted(
        (later.mib - earlier.mib) * 2**20 / (later.ended - earlier.ended)
        for earlier, later in combinations(late, 2)
        if later.ended > earlier.ended
    )
    if not slopes:
        raise ValueError("too few samples, or no session ended: memory's growth cannot be told")
    low, high = _ranks(len(late), len(slopes))
    return Estimate(statistics.median(slopes), slopes[low], slopes[high], 0.95)


def blocks(points: Sequence[Point]) -> list[Point]:
    """Medians of BLOCKS equal parts, or of as many as there are points."""
    count = min(BLOCKS, len(points))
    parts = [points[len(points) * i // count : len(points) * (i + 1) // count] for i in range(count)]
    return [
        Point(statistics.median(point.ended for point in part), statistics.median(point.mib for point in part))
        for part in parts
    ]


def _ranks(blocks_: int, slopes: int) -> tuple[int, int]:
    """Which of the ordered slopes bound the interval, by the variance of Kendall's sum."""
    spread = SIGMAS * sqrt(blocks_ * (blocks_ - 1) * (2 * blocks_ + 5) / 18)
    return max(0, int((slopes - spread) / 2)), min(slopes - 1, int((slopes + spread) / 2) + 1)


# Seconds, tokens so far, sessions that run, sessions that have ended, resident MiB by process.
Sample = tuple[float, int, int, int, dict[str, float]]
# While nothing was under way: sessions that have gone, MiB held, and MiB resident, by process.
Weight = tuple[int, dict[str, float], dict[str, float]]


class Memory:
    """`sockets`: where the services are weighed, by name; Redis tells by itself."""

    def __init__(self, parts: Mapping[str, Process], sockets: Mapping[str, Path], log: RedisLog) -> None:
        self.samples: list[Sample] = []
        self.weights: list[Weight] = []
        self._parts = parts
        self._sockets = sockets
        self._log = log

    def resident_mib(self) -> dict[str, float]:
        """Of each process."""
        page = os.sysconf("SC_PAGE_SIZE") / 2**20
        return {
            name: round(int(Path(f"/proc/{part.process.pid}/statm").read_text().split()[1]) * page, 1)
            for name, part in self._parts.items()
        }

    def held_mib(self) -> dict[str, float]:
        """Allocated and in use, of each process; holds the services up for a moment. BenchError without an answer."""
        try:
            held = {name: weigh(path) for name, path in self._sockets.items()}
            held["redis"] = self._log.held_bytes()
        except (OSError, redis.RedisError) as error:
            raise BenchError(f"memory: {error}") from error
        return {name: round(size / 2**20, 3) for name, size in held.items()}
