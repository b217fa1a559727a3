"""Tokens per second and their ratios, a repeat at a time: a repeat is one pass of a row over all prompts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.interval import Estimate, estimate, percentile
from bench.runs import Run, Sample, of_row


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
