"""Ratios are of whole repeats; spreads are over prompts."""

from __future__ import annotations

import pytest

from bench.harness.runs import acceptance, prompt_ratios, speed_ratio, spread, tokens_per_forward, tokens_per_second
from tests.bench.harness.made_rows import sample

SAMPLES = [
    *(sample("a", repeat, 0, 4.0) for repeat in range(3)),
    *(sample("a", repeat, 1, 2.0) for repeat in range(3)),
    *(sample("d", repeat, 0, seconds) for repeat, seconds in enumerate((1.0, 2.0, 3.0))),
    *(sample("d", repeat, 1, 1.0) for repeat in range(3)),
]


def test_a_ratio_is_total_time_over_total_time() -> None:
    found = speed_ratio(SAMPLES, "d", "a")
    assert (found.value, found.low, found.high) == pytest.approx((6 / 3, 6 / 4, 6 / 2))


def test_prompts_have_ratios_of_their_own() -> None:
    ratios = prompt_ratios(SAMPLES, "d", "a")
    assert ratios == pytest.approx([2.0, 2.0])
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]).lower_quartile == pytest.approx(2.0)


def test_tokens_count_per_second_and_forward() -> None:
    assert tokens_per_second(SAMPLES, "a").value == pytest.approx(1.0)
    assert tokens_per_forward(SAMPLES, "a") == pytest.approx(1.5)
    assert acceptance(SAMPLES, "a") == pytest.approx(0.25)
