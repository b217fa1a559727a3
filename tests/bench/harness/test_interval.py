"""Medians, their intervals and percentiles, on samples whose answer is known."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.harness.interval import estimate, percentile, resampled


def test_seven_samples_take_their_whole_range() -> None:
    found = estimate([5, 1, 7, 3, 2, 6, 4])
    assert (found.value, found.low, found.high) == (4, 1, 7)
    assert found.coverage == pytest.approx(1 - 2 / 2**7)


def test_more_samples_narrow_the_interval() -> None:
    # n = 15: P(B < 4) = 0.0176, P(B < 5) = 0.0592 for B binomial(15, 1/2), so the 4th smallest and largest.
    found = estimate(range(1, 16))
    assert (found.value, found.low, found.high) == (8, 4, 12)
    assert found.coverage == pytest.approx(1 - 2 * (1 + 15 + 105 + 455) / 2**15)


def test_few_samples_say_how_little_they_cover() -> None:
    assert [estimate(range(count)).coverage for count in (1, 2, 5)] == pytest.approx([0.0, 0.5, 0.9375])


def test_the_interval_covers_as_often_as_it_says() -> None:
    draw = random.Random(3)
    hits, trials = 0, 4000
    for _ in range(trials):
        found = estimate([draw.expovariate(1.0) for _ in range(9)])
        hits += found.low <= math.log(2) <= found.high  # the median of the exponential law
    expected = estimate(range(9)).coverage
    assert abs(hits / trials - expected) < 4 * (expected * (1 - expected) / trials) ** 0.5


def test_drawn_anew_a_mean_has_the_interval_that_theory_gives_it() -> None:
    count, values = 400, np.random.default_rng(5).normal(10.0, 2.0, 400)

    def mean(places: NDArray[np.int64]) -> float:
        return float(values[places].mean())

    found = resampled(count, mean)
    beside = 1.96 * float(values.std()) / count**0.5
    assert found.value == pytest.approx(values.mean())
    assert (found.value - found.low, found.high - found.value) == pytest.approx((beside, beside), rel=0.2)
    assert found == resampled(count, mean)


def test_equal_samples_leave_no_doubt() -> None:
    found = resampled(5, lambda places: 3.0 * len(places))
    assert (found.value, found.low, found.high) == (15.0, 15.0, 15.0)
    with pytest.raises(ValueError, match="count"):
        resampled(0, lambda _: 1.0)


def test_percentiles_lie_between_ranks() -> None:
    samples = [40.0, 10.0, 30.0, 20.0]
    assert [percentile(samples, percent) for percent in (0, 50, 95, 100)] == pytest.approx([10, 25, 38.5, 40])


def test_nothing_has_no_median() -> None:
    with pytest.raises(ValueError, match="samples"):
        estimate([])
    with pytest.raises(ValueError, match="samples"):
        percentile([], 50)
    with pytest.raises(ValueError, match="percent: must be from 0 to 100, not 101"):
        percentile([1.0], 101)
