"""Timed generations: what one yields, whichever row made it; tokens per second of a row, and ratios of two rows.

Speeds are of a repeat at a time: a repeat is one pass of a row over all prompts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.harness.interval import Estimate, estimate, percentile
from specwire.client import Timings
from specwire.client.events import Stats


class BenchError(RuntimeError):
    """The measurement cannot go on; one sentence."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens reaching the client: how many, when (monotonic ns), and the stack's own account of the way."""

    tokens: int
    received_ns: int
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One generation.

    Attributes:
        seconds: from the call to the last token's return.
        first_token_seconds: from the call to the first token.
        forwards: of the target.
        tested, accepted: draft tokens; tested means that all before it in the window were accepted. None if unknown.
        plan: how its end was drafted, and why; empty if unknown.
        stats: the stack's own account; None for others.
    """

    tokens: tuple[int, ...]
    seconds: float
    first_token_seconds: float
    forwards: int
    tested: int | None = None
    accepted: int | None = None
    arrivals: tuple[Arrival, ...] = ()
    plan: str = ""
    stats: Stats | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A run and its place: which repeat, which prompt, which row."""

    repeat: int
    prompt: int
    row: str
    run: Run


class Row(Protocol):
    """One way to generate greedily, whatever tokens come, end-of-text included.

    Attributes:
        key: its letter.
        label: for people.
    """

    @property
    def key(self) -> str: ...

    @property
    def label(self) -> str: ...

    def run(self, prompt: Sequence[int], tokens: int) -> Run:
        """Generate exactly `tokens` tokens; BenchError if it cannot."""
        ...


def of_row(samples: Sequence[Sample], row: str) -> list[Sample]:
    return [sample for sample in samples if sample.row == row]


@dataclass(frozen=True, slots=True)
class Spread:
    """Over the prompts: the ratio of two rows' times on a prompt, median of its repeats."""

    least: float
    lower_quartile: float
    upper_quartile: float
    most: float


def repeat_speeds(samples: Sequence[Sample], row: str) -> list[float]:
    """Tokens per second of each repeat."""
    counts = _per_repeat(samples, row, lambda run: len(run.tokens))
    times = _per_repeat(samples, row, lambda run: run.seconds)
    return [counts[repeat] / times[repeat] for repeat in times]


def tokens_per_second(samples: Sequence[Sample], row: str) -> Estimate:
    return estimate(repeat_speeds(samples, row))


def speed_ratio(samples: Sequence[Sample], faster: str, slower: str) -> Estimate:
    """How many times as fast one row is as another: the ratio of their total times, repeat by repeat."""
    ours = _per_repeat(samples, faster, lambda run: run.seconds)
    theirs = _per_repeat(samples, slower, lambda run: run.seconds)
    return estimate([theirs[repeat] / ours[repeat] for repeat in ours])


def prompt_ratios(samples: Sequence[Sample], faster: str, slower: str) -> list[float]:
    """The same for each prompt, in the prompts' order."""
    ours, theirs = _per_prompt(samples, faster), _per_prompt(samples, slower)
    return [
        statistics.median(slow / fast for slow, fast in zip(theirs[prompt], ours[prompt], strict=True))
        for prompt in sorted(ours)
    ]


def spread(ratios: Sequence[float]) -> Spread:
    return Spread(min(ratios), percentile(ratios, 25), percentile(ratios, 75), max(ratios))


def tokens_per_forward(samples: Sequence[Sample], row: str) -> float:
    runs = [sample.run for sample in of_row(samples, row)]
    return sum(len(run.tokens) for run in runs) / sum(run.forwards for run in runs)


def acceptance(samples: Sequence[Sample], row: str) -> float | None:
    """Accepted draft tokens among those tested; None where that is not known or none was tested."""
    runs = [sample.run for sample in of_row(samples, row)]
    tested = sum(run.tested or 0 for run in runs)
    return sum(run.accepted or 0 for run in runs) / tested if tested else None


def first_token_ms(samples: Sequence[Sample], row: str) -> float:
    """Median time to the first token."""
    return statistics.median(sample.run.first_token_seconds for sample in of_row(samples, row)) * 1e3


def _per_repeat(samples: Sequence[Sample], row: str, of: Callable[[Run], float]) -> dict[int, float]:
    totals: dict[int, float] = {}
    for sample in of_row(samples, row):
        totals[sample.repeat] = totals.get(sample.repeat, 0.0) + of(sample.run)
    return totals


def _per_prompt(samples: Sequence[Sample], row: str) -> dict[int, list[float]]:
    times: dict[int, list[float]] = {}
    for sample in of_row(samples, row):
        times.setdefault(sample.prompt, []).append(sample.run.seconds)
    return times
