"""Expected-speed formulas against brute force and by hand."""

from __future__ import annotations

from itertools import product

import pytest

from specwire.core.policy.estimates import (
    AcceptanceByPosition,
    Agreement,
    ForwardTimes,
    affordable,
    expected_tokens,
    lockstep_rate,
    smoothed,
)


def test_forward_times_between_and_beyond_the_measured() -> None:
    times = ForwardTimes({4: 40.0, 1: 10.0, 8: 48.0})
    assert [times.at(m) for m in (1, 2, 3, 4, 6, 8, 10)] == [10.0, 20.0, 30.0, 40.0, 44.0, 48.0, 52.0]
    assert times.points == {1: 10.0, 4: 40.0, 8: 48.0}


def test_forward_times_that_fall_do_not_fall_for_ever() -> None:
    assert ForwardTimes({4: 27.0, 5: 16.0}).at(32) == 16.0


@pytest.mark.parametrize("measured", [{}, {0: 1.0}])
def test_forward_times_need_a_width(measured: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="measured"):
        ForwardTimes(measured)


def test_acceptance_converges_to_each_position_s_rate() -> None:
    rates = AcceptanceByPosition()
    for _ in range(200):
        rates.observe(3, 3)
        rates.observe(3, 1)
    assert rates.rates(1)[0] > 0.97
    assert rates.rates(2)[1] == pytest.approx(0.5, abs=0.06)
    assert rates.rates(3)[2] > 0.9


def test_positions_behind_a_refusal_are_not_tested() -> None:
    rates, known = AcceptanceByPosition(), AcceptanceByPosition()
    for _ in range(50):
        rates.observe(4, 0)
        known.observe(1, 0)
    assert rates.rates(4) == known.rates(4)


def test_windows_may_exceed_what_is_kept() -> None:
    rates = AcceptanceByPosition(most=3)
    for accepted in (0, 5, 2, 1, 3):
        rates.observe(6, accepted)
    assert len(rates.rates(6)) == 6
    assert rates.rates(6)[:2] == rates.rates(2)


def test_what_a_few_tests_said_of_a_position_fades_while_windows_are_shorter() -> None:
    """Otherwise bad luck there keeps windows short, and short windows keep the bad luck on record."""
    rates = AcceptanceByPosition()
    for _ in range(4):
        rates.observe(2, 1)
    unlucky = rates.rates(2)[1]
    for _ in range(100):
        rates.observe(1, 1)
    first, second = rates.rates(2)
    assert unlucky < 0.6
    assert second > 0.9 * first


def test_a_try_is_paid_by_the_time_since_the_last_one() -> None:
    """0.5 % of it."""
    assert affordable(1_000.0, 201_000.0)
    assert not affordable(1_000.0, 199_000.0)
    assert affordable(0.0, 0.0)


@pytest.mark.parametrize("window", range(4))
def test_expected_tokens_is_the_mean_over_all_outcomes(window: int) -> None:
    rates = [0.9, 0.5, 0.25]
    mean = 0.0
    for outcome in product([True, False], repeat=window):
        probability = 1.0
        for accepted, rate in zip(outcome, rates, strict=False):
            probability *= rate if accepted else 1 - rate
        run = next((i for i, accepted in enumerate(outcome) if not accepted), window)
        mean += probability * (run + 1)
    assert expected_tokens(rates, window) == pytest.approx(mean)


def test_lockstep_rate() -> None:
    V = ForwardTimes({1: 30.0, 3: 40.0}).at
    assert lockstep_rate([0.5, 0.5], 0, 8.0, V, 5.0) == pytest.approx(1 / 30)
    assert lockstep_rate([0.5, 0.5], 2, 8.0, V, 5.0) == pytest.approx(1.75 / (16 + 5 + 40))


def test_agreement_counts_what_was_compared_and_the_end_of_a_tree() -> None:
    known = Agreement()
    prior = known.rate
    for _ in range(100):
        known.observe(3, contradicted=True)
    assert known.rate == pytest.approx(0.75, abs=0.02)
    assert Agreement().rate == prior > 0.5


def test_smoothing_bounds_outliers_and_takes_the_first_value_as_it_is() -> None:
    assert smoothed(None, 7.0) == 7.0
    assert smoothed(10.0, 1e9) == pytest.approx(14.0)
    assert smoothed(10.0, 5.0, weight=0.5) == pytest.approx(7.5)
    assert smoothed(0.0, 5.0) == 0.0
