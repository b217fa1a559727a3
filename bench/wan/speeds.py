"""Speeds of disciplines and their ratios, from sessions of equal length, repeat by repeat."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.interval import Estimate, estimate
from bench.runs import Sample, of_row


def speeds(samples: Sequence[Sample], row: str) -> list[float]:
    """Tokens per second of each session of a row, first token's delay included."""
    return [len(sample.run.tokens) / sample.run.seconds for sample in of_row(samples, row)]


def tokens_per_second(samples: Sequence[Sample], row: str) -> Estimate:
    return estimate(speeds(samples, row))


def ratio(samples: Sequence[Sample], row: str, to: str) -> Estimate:
    """How many times as fast a row is as another, over the repeats that both had."""
    pairs = zip(speeds(samples, row), speeds(samples, to), strict=False)
    return estimate([one / other for one, other in pairs])


def ratio_to_better(samples: Sequence[Sample], row: str, others: Sequence[str]) -> Estimate:
    """The same, to whichever of the others has the greater median."""
    best = max(others, key=lambda other: statistics.median(speeds(samples, other)))
    return ratio(samples, row, best)


def ratio_to(samples: Sequence[Sample], row: str, speed: float) -> Estimate:
    """A row's speed over a known one."""
    return estimate([one / speed for one in speeds(samples, row)])


def times(one: Estimate, factor: float) -> Estimate:
    """The same in other units."""
    return Estimate(one.value * factor, one.low * factor, one.high * factor, one.coverage)


def first_token_ms(samples: Sequence[Sample], row: str) -> Estimate:
    return estimate([1000 * sample.run.first_token_seconds for sample in of_row(samples, row)])
