"""The figures of a crowd, what was needed, and their form for people and on disk (bench/results/load.json)."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import combinations
from math import sqrt
from pathlib import Path

import redis

from bench.harness.interval import Estimate
from bench.harness.record import save
from bench.harness.report import Bar, at_least, at_most, bar_lines, exactly, none_of
from bench.harness.runs import BenchError
from bench.harness.services import Process, RedisLog
from bench.soak.report import WHOLE_MINUTES
from bench.soak.weighing import weigh

# ----------------------------------------------------------------------------------------------------------------------
# The resident and the held memory of a load's processes, and whether it grows: a slope with an interval.
#
# A leak keeps something of each ended session, so memory is plotted over the number of ended sessions. Successive
# samples are correlated, and memory moves in steps; a straight line's usual interval would be far too narrow. So the
# later two thirds of the run are cut into blocks, each represented by its median. The slope is the median of the slopes
# between any two blocks, with its distribution-free interval (Theil, 1950; Sen, 1968).
#
# The bound is below the least record of a session that anything could keep: its id (81 bytes), a prompt of 16 tokens
# (168), parameters and times, and the objects and tables around them, some 600 bytes in all; a whole session is tens of
# KiB. A share of all memory would say less: a slow service could leak what a fast one may not, and leaks that a short
# run does not show would pass. Resident memory varies by more than ten minutes of such a leak; held memory
# (`bench.soak.weighing`) does not.

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


# ----------------------------------------------------------------------------------------------------------------------
# The report.

# Redis keeps the request ids, for as long as the sessions' logs may live and longer.
OURS = ("orchestrator", "verifier")
GROWING = (*OURS, "redis")
MOST_SHOWN = 20
# What a record is of.
WHOLE_SESSIONS = 1000


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A run.

    Attributes:
        tokens_per_second: at full speed; the rest is of the paced run.
        before: MiB by process, resident, before the crowd came.
        samples, weights: see `Memory`.
        sessions: at a time, those that nobody reads on included.
        idle: for each session that nobody read on: tokens decided before the crowd came, and at the end.
        unread: tokens that these had asked for.
    """

    arguments: Mapping[str, object]
    ran_on: Mapping[str, object]
    tokens_per_second: float
    before: Mapping[str, float]
    samples: Sequence[Sample]
    weights: Sequence[Weight]
    sessions: int
    ended: int
    errors: Sequence[str]
    judged: int
    mismatches: int
    idle: Sequence[tuple[int, int]]
    unread: int

    @property
    def whole(self) -> bool:
        """As long, and of as many sessions, as what is recorded."""
        return self.samples[-1][0] >= 60 * WHOLE_MINUTES - 30 and self._asked >= WHOLE_SESSIONS

    @property
    def _asked(self) -> int:
        """Sessions to be there at every look, besides those that nobody reads on."""
        return self.sessions - len(self.idle)

    @property
    def paced(self) -> float:
        """Tokens per second while memory was looked at."""
        (begin, first, *_), (end, last, *_) = self.samples[0], self.samples[-1]
        return (last - first) / (end - begin) if end > begin else 0.0

    @property
    def kib_per_session(self) -> dict[str, float]:
        """At most, over what the process had before."""
        most = {name: max(memory[name] for *_, memory in self.samples) for name in self.before}
        return {name: round((size - self.before[name]) * 1024 / self.sessions, 1) for name, size in most.items()}

    @property
    def kept(self) -> dict[str, Estimate]:
        """Bytes that each session leaves behind when it has ended, by process, of what is held.

        A run that is too short to tell has none.
        """
        return _kept([(gone, held) for gone, held, _ in self.weights])

    @property
    def resident_kept(self) -> dict[str, Estimate]:
        """The same of resident memory, which moves by itself, too: by what the allocator has not given back."""
        return _kept([(gone, resident) for gone, _, resident in self.weights])

    @property
    def bars(self) -> list[Bar]:
        moved = sum(later > first for first, later in self.idle)
        fewest = min((running for _, _, running, _, _ in self.samples), default=0)
        return [
            at_least("fewest sessions at a look", exactly(fewest), self._asked),
            none_of("sessions that failed", len(self.errors)),
            none_of("mismatches", self.mismatches),
            *(at_most(f"bytes kept of an ended session, {name}", self.kept[name], MOST_KEPT) for name in self._told),
            *self._resident_bars,
            none_of("services whose growth could not be told", len(GROWING) - len(self._told)),
            none_of("unread sessions decided to their end", sum(last >= self.unread for _, last in self.idle)),
            none_of("unread sessions decided further meanwhile", moved),
        ]

    @property
    def _told(self) -> list[str]:
        return [name for name in GROWING if name in self.kept]

    @property
    def _resident_bars(self) -> list[Bar]:
        """Of what is not held, growth can be shown, but not that there is none."""
        found = self.resident_kept
        name = "bytes of resident memory kept of one, at least"
        return [at_most(f"{name}, {of}", exactly(round(found[of].low, 1)), MOST_KEPT) for of in OURS if of in found]

    @property
    def holds(self) -> bool:
        return all(bar.holds for bar in self.bars)

    @property
    def figures(self) -> dict[str, object]:
        return {
            "sessions": self.sessions,
            "sessions_ended": self.ended,
            "tokens": self.samples[-1][1],
            "tokens_per_second": round(self.tokens_per_second, 1),
            "tokens_per_second_paced": round(self.paced, 1),
            "judged_tokens": self.judged,
            "mib_before": dict(self.before),
            "mib_at_the_end": self.samples[-1][4],
            "kib_per_session": self.kib_per_session,
            "kept_bytes": _intervals(self.kept),
            "resident_kept_bytes": _intervals(self.resident_kept),
            "unread_decided": sorted(last for _, last in self.idle),
        }

    def write(self, path: Path) -> None:
        found = {"bars": [asdict(bar) for bar in self.bars], **self.figures, "errors": list(self.errors)[:MOST_SHOWN]}
        looked = {"samples": self.samples, "weights": self.weights}
        save(path, {**found, **looked}, self.arguments, ran_on=self.ran_on)

    def shown(self) -> str:
        rows = [f"{name.replace('_', ' ')}: {value}" for name, value in self.figures.items()]
        parts = (rows, bar_lines(self.bars), list(self.errors)[:MOST_SHOWN])
        return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _kept(memory: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, Estimate]:
    found = {}
    for name in memory[0][1] if memory else ():
        with suppress(ValueError):
            found[name] = kept_bytes([Point(ended, sizes[name]) for ended, sizes in memory])
    return found


def _intervals(kept: Mapping[str, Estimate]) -> dict[str, list[float]]:
    return {name: [round(x, 1) for x in (each.value, each.low, each.high)] for name, each in kept.items()}
