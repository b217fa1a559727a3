"""The median of a few repeats with a confidence interval that only assumes independence."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES, SEED = 2000, 7


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, and an interval [low, high] that covers the true one with probability `coverage`."""

    value: float
    low: float
    high: float
    coverage: float

    def __format__(self, form: str) -> str:
        """Like "1.52 [1.48, 1.60]"; the form is that of each number."""
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"


def estimate(samples: Sequence[float]) -> Estimate:
    """The median's interval between order statistics: the narrowest symmetric one that covers 95 %.

    The number of samples below the true median is binomial(n, 1/2), so [x(k), x(n+1-k)] misses it with probability
    2 P(B < k). Fewer than 6 samples cannot reach 95 %: then the interval is their whole range and `coverage` says so.
    """
    if not samples:
        raise ValueError("samples: must not be empty")
    ordered = sorted(samples)
    n = len(ordered)
    k = max((k for k in range(1, (n + 1) // 2 + 1) if _coverage(n, k) >= CONFIDENCE), default=1)
    return Estimate(statistics.median(ordered), ordered[k - 1], ordered[n - k], _coverage(n, k))


def _coverage(n: int, k: int) -> float:
    return 1 - 2 * sum(comb(n, below) for below in range(k)) / (1 << n)


def resampled(count: int, value: Callable[[NDArray[np.int64]], float]) -> Estimate:
    """`value` of samples by their numbers, of which there are `count`: of all, and of as many drawn from them.

    For what is a ratio of sums over samples that are measured once. The interval is the middle 95 % of RESAMPLES draws
    with replacement (the bootstrap's percentile interval: Efron, Tibshirani 1993, section 13.3).
    """
    if count < 1:
        raise ValueError("count: must be at least 1")
    chance = np.random.default_rng(SEED)
    drawn = [value(chance.integers(count, size=count)) for _ in range(RESAMPLES)]
    beside = 50 * (1 - CONFIDENCE)
    return Estimate(value(np.arange(count)), percentile(drawn, beside), percentile(drawn, 100 - beside), CONFIDENCE)


def percentile(samples: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks."""
    if not samples:
        raise ValueError("samples: must not be empty")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent: must be from 0 to 100, not {percent}")
    ordered = sorted(samples)
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)
