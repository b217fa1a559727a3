"""Made-up runs of many sessions at once, with chosen times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.batch.figures import BatchSample
from bench.batch.rows import (
    AUTOMATIC,
    CONTINUOUS,
    HEADED,
    OFF,
    ON,
    OURS,
    PADDED,
    SAMPLED,
    SAMPLED_HEADED,
    SAMPLED_OFF,
    Together,
)
from bench.harness.runs import Arrival, Run
from specwire.client import Timings
from specwire.client.events import Step

MS = 1_000_000
# Seconds of 10 tokens of each session, per session at once.
GREEDY = {OFF: 0.10, ON: 0.12, AUTOMATIC: 0.05, HEADED: 0.04, PADDED: 0.20, CONTINUOUS: 0.08}
SECONDS = {**GREEDY, SAMPLED_OFF: 0.20, SAMPLED: 0.16, SAMPLED_HEADED: 0.25}


def step(number: int, sessions: int, gap_us: int = 200, forward_us: int = 2000) -> Step:
    return Step(number, sessions, sessions, forward_us, choose_us=50, gap_us=gap_us, waited_us=0)


def timed_run(seconds: float, steps: Sequence[Step], tokens: Sequence[int] = tuple(range(10))) -> Run:
    """A token each 10 ms, each with its step."""
    arrivals = [Arrival(1, 10 * MS * (index + 1), Timings(1, 2, 3, 4, each)) for index, each in enumerate(steps)]
    return Run(tuple(tokens), seconds, seconds / 10, forwards=len(steps), arrivals=tuple(arrivals))


def made(levels: Sequence[int] = (1, 16), repeats: int = 7) -> list[BatchSample]:
    return list(_made(levels, repeats))


def _made(levels: Sequence[int], repeats: int) -> Iterator[BatchSample]:
    for level in levels:
        for repeat in range(repeats):
            for row, seconds in SECONDS.items():
                slower = seconds * level * (1 + repeat / 10)
                steps = [step(number, level if row in OURS else 0) for number in range(10)]
                yield BatchSample(level, repeat, 0, row, Together(slower, (timed_run(slower, steps),) * level))
