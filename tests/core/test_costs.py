from __future__ import annotations

import pytest

from specwire.core.costs import StepCosts
from specwire.core.speed import ForwardTimes
from specwire.lm import load_model
from verify_service.calibrate import WIDTHS, calibrate


def costs() -> StepCosts:
    return StepCosts(ForwardTimes({1: 1000.0, 4: 1300.0}))


def test_plain_step_is_the_forward_and_the_software_around_it() -> None:
    learned = costs()
    assert learned.plain(1) == 1000.0
    learned.observe_overhead(200.0)
    assert learned.plain(1) == 1200.0


def test_overhead_never_counts_for_more_than_the_forward() -> None:
    learned = costs()
    learned.observe_overhead(9000.0)
    assert learned.plain(1) == 2000.0


def test_plain_time_is_learned_with_drafters_idle_only() -> None:
    learned = costs()
    for _ in range(200):
        learned.observe(1, 1, 2000.0, drafting=True, waited=False)
        learned.observe(2, 2, 2000.0, drafting=True, waited=False)
    assert learned.plain(1) == 1000.0
    assert learned.plain(2) == pytest.approx(1100.0)
    for _ in range(200):
        learned.observe(1, 1, 2000.0, drafting=False, waited=False)
        learned.observe(2, 2, 2500.0, drafting=False, waited=False)
    assert learned.plain(1) == pytest.approx(2000.0, rel=0.01)
    assert learned.plain(2) == pytest.approx(2500.0, rel=0.01)


def test_wide_steps_of_one_session_refine_their_width() -> None:
    learned = costs()
    for _ in range(200):
        learned.observe(1, 4, 1600.0, drafting=True, waited=False)
        learned.observe(2, 4, 9000.0, drafting=True, waited=False)
    assert learned.forward.at(4) == pytest.approx(1600.0, rel=0.01)


def test_calibration_measures_every_width_and_leaves_the_slot_empty() -> None:
    lm = load_model("scripted:3", slots=1)
    times = calibrate(lm, budget_s=0.05)
    assert tuple(times.points) == WIDTHS
    assert all(time > 0 for time in times.points.values())
    assert lm.cached(0) == 0


def test_calibration_fits_a_small_context() -> None:
    assert tuple(calibrate(load_model("scripted:3", slots=1, context=4), budget_s=0.01).points) == (1, 2)
