from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from specwire.core.policy.costs import StepCosts
from specwire.core.policy.estimates import ForwardTimes
from specwire.core.policy.tunables import STEP_OUTLIER
from specwire.lm import Feed, load_model
from verify_service.engine.calibration import WIDTHS, calibrate, calibrate_batches, undisturbed


def costs() -> StepCosts:
    return StepCosts(ForwardTimes({1: 1000.0, 4: 1300.0}))


def test_plain_step_is_the_forward_and_the_software_around_it() -> None:
    learned = costs()
    assert learned.plain(1) == 1000.0
    learned.observe(1, 1, 1000.0, 200.0, drafting=True, waited=False)
    assert learned.plain(1) == 1200.0


def test_what_is_around_a_forward_never_counts_for_more_than_the_forward() -> None:
    learned = costs()
    learned.observe(1, 1, 1000.0, 9000.0, drafting=True, waited=False)
    assert learned.plain(1) == 2000.0


def test_no_forward_takes_longer_than_those_that_it_could_be_made_of() -> None:
    """As measured beside other work: one hiccup at 12 rows, after which no wider window would ever have been tried."""
    measured = {1: 2270.0, 2: 2378.0, 4: 2276.0, 8: 3137.0, 12: 23975.0, 16: 5900.0, 24: 17979.0, 32: 11000.0}
    found = undisturbed(measured)
    assert found == {**measured, 12: 3137.0 + 2276.0, 24: 5900.0 + 3137.0}
    assert undisturbed({4: 400.0, 16: 9_000.0}) == {4: 400.0, 16: 1_600.0}
    assert undisturbed({1: 5_000.0}) == {1: 5_000.0}
    assert list(undisturbed({8: 1.0, 1: 1.0})) == [1, 8]


def test_what_was_measured_of_batches_is_so_in_sessions_and_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {(4, 1): 1_300.0, (4, 4): 90_000.0, (6, 1): 40_000.0, (6, 4): 2_500.0}
    monkeypatch.setattr("verify_service.engine.calibration._times", lambda *_: dict(measured))
    found = calibrate_batches(load_model("scripted:3", slots=6), budget_s=0.0)
    assert found == {(4, 1): 1_300.0, (4, 4): 5_200.0, (6, 1): 2_600.0, (6, 4): 2_500.0}


def test_what_is_around_the_forwards_of_a_batch_is_known_before_its_plain_steps() -> None:
    learned = batch_costs()
    learned.observe(4, 8, 1500.0, 300.0, drafting=True, waited=False)
    assert learned.plain(4) == pytest.approx(1330.0 + 300.0)
    assert learned.plain(1) == 1000.0


def test_a_batch_that_was_not_seen_is_like_the_next_one_that_was() -> None:
    learned = batch_costs()
    for _ in range(300):
        learned.observe(16, 16, 2 * 2650.0, 0.0, drafting=False, waited=False)
    assert batch_costs().plain(16) == pytest.approx(2650.0)
    assert learned.plain(14) == pytest.approx(2 * batch_costs().plain(14), rel=0.01)


def test_what_windows_take_around_the_forward_is_theirs() -> None:
    learned = batch_costs()
    windows_us = learned.of(4)(16) - learned.plain(4)
    for _ in range(300):
        learned.observe(4, 4, 1330.0, 200.0, drafting=False, waited=False)
    for _ in range(300):
        learned.observe(4, 16, 1330.0 + windows_us, 500.0, drafting=False, waited=False)
    assert learned.plain(4) == pytest.approx(1530.0, rel=0.01)
    assert learned.of(4)(16) - learned.plain(4) == pytest.approx(windows_us + 300.0, rel=0.05)


def test_plain_time_is_learned_with_drafters_idle_only() -> None:
    learned = costs()
    for _ in range(200):
        learned.observe(1, 1, 2000.0, 0.0, drafting=True, waited=False)
        learned.observe(2, 2, 2000.0, 0.0, drafting=True, waited=False)
    assert learned.plain(1) == 1000.0
    assert learned.plain(2) == pytest.approx(1100.0)
    for _ in range(200):
        learned.observe(1, 1, 2000.0, 0.0, drafting=False, waited=False)
        learned.observe(2, 2, 2500.0, 0.0, drafting=False, waited=False)
    assert learned.plain(1) == pytest.approx(2000.0, rel=0.01)
    assert learned.plain(2) == pytest.approx(2500.0, rel=0.01)


def test_steps_just_behind_a_draft_are_not_plain() -> None:
    """A drafter that was asked to stop ends its pass first: two steps a turn never count, the third one does."""
    learned = costs()
    for _ in range(200):
        learned.observe(1, 4, 1300.0, 0.0, drafting=True, waited=False)
        for _ in range(2):
            learned.observe(1, 1, 1250.0, 0.0, drafting=False, waited=False)
    assert learned.plain(1) == 1000.0
    learned.observe(1, 1, 1250.0, 0.0, drafting=False, waited=False)
    assert learned.plain(1) > 1000.0


def test_a_wide_step_that_is_faster_than_narrow_ones_were_shows_that_they_are_too() -> None:
    learned = costs()
    for _ in range(300):
        learned.observe(1, 4, 800.0, 0.0, drafting=True, waited=False)
    assert learned.plain(1) == pytest.approx(1000.0 * 800.0 / 1300.0, rel=0.01)


def test_a_plain_step_behind_a_window_shows_nothing() -> None:
    """It is slower: the window left another shape behind, and a head its weights in the caches."""
    learned = costs()
    for _ in range(100):
        learned.observe(1, 4, 1300.0, 0.0, drafting=False, waited=False)
        learned.observe(1, 1, 1600.0, 0.0, drafting=False, waited=False)
    assert learned.plain(1) == 1000.0
    learned.observe(1, 1, 1100.0, 0.0, drafting=False, waited=False)
    assert learned.plain(1) > 1000.0


def test_a_machine_that_has_become_slower_or_faster_shows_so_by_whatever_is_computed() -> None:
    for factor in (2.0, 0.5):
        times = ForwardTimes({1: 1000.0, 4: 1300.0})
        for _ in range(30):
            times.observe(4, factor * 1300.0)
        assert times.at(1) == pytest.approx(factor * 1000.0, rel=0.01)
        times.observe(1, 1000.0)
        times.observe(1, 1000.0)
        assert times.at(1) == pytest.approx(1000.0, rel=0.25), "a plain step tells more"


def test_what_a_width_takes_beside_another_shows_where_one_follows_the_other() -> None:
    times = ForwardTimes({1: 1000.0, 2: 1100.0, 4: 1300.0})
    for step in range(200):
        slowness = 2.0 if step // 20 % 2 else 1.0
        times.observe(1, slowness * 1000.0)
        times.observe(4, slowness * 1600.0)
    assert times.at(4) / times.at(1) == pytest.approx(1.6, rel=0.02)
    assert times.at(2) / times.at(1) == pytest.approx(1.1, rel=0.01)


def test_a_width_between_two_is_learnt_and_no_wider_one_is_thought_cheaper() -> None:
    """As quantised products: 5 rows take as long as 8."""
    times = ForwardTimes({1: 1000.0, 4: 1500.0, 8: 2700.0})
    assert times.at(5) == pytest.approx(1800.0)
    for _ in range(50):
        times.observe(1, 1000.0)
        times.observe(5, 2900.0)
    assert times.at(5) == pytest.approx(2900.0, rel=0.02)
    assert times.at(4) == pytest.approx(1500.0, rel=0.02)
    assert times.at(8) >= times.at(5)


def test_what_a_busy_machine_made_of_a_width_is_forgotten() -> None:
    """Thought to take as long as 32 plain steps it was never tried again, on a machine that had long been quiet."""
    times = ForwardTimes({1: 1000.0, 2: 1200.0, 4: 1400.0})
    for _ in range(20):
        times.observe(1, 1000.0)
        times.observe(2, 90_000.0)
    assert times.at(2) <= 2.0 * times.at(1), "two plain steps would do the same"
    for _ in range(3):
        times.observe(1, 1000.0)
        times.observe(4, 1800.0)
        times.observe(1, 1000.0)
    assert times.at(4) == pytest.approx(1800.0, rel=0.3)
    for _ in range(1000):
        times.observe(1, 1000.0)
    assert times.points == {1: pytest.approx(1000.0), 2: pytest.approx(1200.0), 4: pytest.approx(1400.0)}


def test_a_hiccup_in_every_third_step_hides_no_width() -> None:
    times = ForwardTimes({1: 1000.0, 2: 1900.0, 4: 2800.0})
    for step in range(30):
        times.observe(1, 1000.0)
        times.observe(4, 1400.0 * (30.0 if step % 3 == 0 else 1.0))
    assert times.at(4) / times.at(1) == pytest.approx(1.4, rel=0.02)
    assert times.at(2) <= times.at(4), "measured while something else ran"


@pytest.mark.parametrize(("plain_us", "share"), [(1000.0, 2.6), (2000.0, 1.3)])
def test_where_windows_alone_tell_of_a_change_a_plain_step_shows_what_has_changed(
    plain_us: float, share: float
) -> None:
    """Windows take twice as long: it is they, or the machine."""
    times = ForwardTimes({1: 1000.0, 4: 1300.0})
    for _ in range(100):
        times.observe(4, 1300.0)
    assert not times.doubtful
    asked = 0
    for _ in range(40):
        times.observe(4, 2600.0)
        if times.doubtful:
            times.observe(1, plain_us)
            asked += 1
    assert times.at(4) / times.at(1) == pytest.approx(share, rel=0.2)
    assert times.at(1) == pytest.approx(plain_us, rel=0.25)
    assert 1 <= asked <= 8


def test_what_a_window_adds_around_its_forward_is_the_windows_of_one_session_too() -> None:
    learned = costs()
    for _ in range(300):
        for _ in range(4):
            learned.observe(1, 1, 1000.0, 200.0, drafting=False, waited=False)
        learned.observe(1, 4, 1300.0, 500.0, drafting=False, waited=False)
    assert learned.plain(1) == pytest.approx(1200.0, rel=0.01)
    assert learned.of(1)(4) == pytest.approx(1800.0, rel=0.02)


def test_a_window_takes_about_its_forward_at_least_however_slow_the_software_of_plain_steps_was() -> None:
    """Of a busy machine's first step all is known, and no plain one may follow for long."""
    learned = costs()
    learned.observe(1, 1, 30_000.0, 25_000.0, drafting=True, waited=False)
    for _ in range(300):
        learned.observe(1, 4, 1300.0, 500.0, drafting=True, waited=False)
    assert learned.forward.at(4) >= 1300.0 / STEP_OUTLIER
    assert learned.plain(1) > 0.0


def test_what_nobody_expected_of_a_step_is_nobody_s() -> None:
    learned = costs()
    assert learned.unexpected_us(1, 4, 1300.0) == pytest.approx(0.0)
    assert learned.unexpected_us(1, 4, 11_300.0) == pytest.approx(10_000.0)
    assert learned.unexpected_us(1, 4, 500.0) == pytest.approx(-800.0), "nor is a step that was lucky a gain"
    assert learned.unexpected_us(1, 1, 11_300.0) == 0.0, "a plain step is charged for nothing"


def test_an_orchestrator_believes_its_verifier_what_a_plain_step_takes() -> None:
    known = ForwardTimes({1: 1000.0, 4: 1300.0})
    for _ in range(300):
        known.told(1, 2000.0, 1100.0)
        known.told(4, 1500.0, 1100.0)
        known.told(1, 2000.0, 0.0)
    assert known.at(1) == pytest.approx(1100.0, rel=0.01)
    assert known.at(4) == pytest.approx(1500.0, rel=0.01)


def test_wide_steps_of_one_session_refine_their_width() -> None:
    learned = costs()
    for _ in range(200):
        learned.observe(1, 4, 1600.0, 0.0, drafting=True, waited=False)
        learned.observe(2, 4, 9000.0, 0.0, drafting=True, waited=False)
    assert learned.forward.at(4) == pytest.approx(1600.0, rel=0.01)


def test_calibration_measures_every_width_and_leaves_the_slot_empty() -> None:
    lm = load_model("scripted:3", slots=1)
    times = calibrate(lm, budget_s=0.05)
    assert tuple(times.points) == WIDTHS
    assert all(time > 0 for time in times.points.values())
    assert lm.cached(0) == 0


def test_calibration_fits_a_small_context() -> None:
    assert tuple(calibrate(load_model("scripted:3", slots=1, context=4), budget_s=0.01).points) == (1, 2)


@pytest.mark.parametrize(("long_us", "turns"), [(1e9, 2 * 3 * WIDTHS), (0.0, (1, 1, 1))])
def test_long_forwards_are_measured_once(
    monkeypatch: pytest.MonkeyPatch, long_us: float, turns: tuple[int, ...]
) -> None:
    """Whoever has lost another verifier waits for this one. Plain decoding is measured in every round all the same."""
    monkeypatch.setattr("verify_service.engine.calibration.LONG_US", long_us)
    lm = load_model("scripted:3", slots=1)
    fed: list[int] = []
    forward = lm.forward

    def counted(feeds: Sequence[Feed]) -> torch.Tensor:
        fed.append(sum(len(feed.tokens) for feed in feeds))
        return forward(feeds)

    monkeypatch.setattr(lm, "forward", counted)
    assert tuple(calibrate(lm, budget_s=0.0).points) == WIDTHS
    prefix, widths = fed[0], fed[1:]
    assert (prefix, *widths[: len(WIDTHS) + 1]) == (64, 1, *WIDTHS)  # the first time, which may compile
    assert sorted(widths[len(WIDTHS) + 1 :]) == sorted(turns)


def batch_costs() -> StepCosts:
    """Each further session adds 100 us at one position and 200 us at four; a row adds 10 us."""
    forward = ForwardTimes({1: 1000.0, 101: 2000.0})
    measured = {
        (sessions, depth): forward.at(sessions * depth) + (sessions - 1) * added
        for sessions in (4, 16)
        for depth, added in ((1, 100.0), (4, 200.0))
    }
    return StepCosts(forward, measured)


@pytest.mark.parametrize(
    ("sessions", "rows", "expected"),
    [
        (1, 4, 1030.0),
        (4, 4, 1030.0 + 300.0),
        (4, 16, 1150.0 + 600.0),
        (4, 10, 1090.0 + 450.0),
        (2, 2, 1010.0 + 100.0),
        (10, 10, 1090.0 + 900.0),
        (16, 160, 2590.0 + 3000.0),
        (31, 31, 1300.0 + 3000.0),
    ],
)
def test_what_further_sessions_cost_is_measured_and_linear_between(sessions: int, rows: int, expected: float) -> None:
    assert batch_costs().of(sessions)(rows) == pytest.approx(expected)


def test_a_step_takes_time_also_where_forwards_of_one_session_were_measured_too_slow() -> None:
    """A hiccup while V(m) was measured is forgotten; what was taken from it for further sessions is not to stay."""
    forward = ForwardTimes({1: 30_000.0, 16: 30_000.0})
    costs = StepCosts(forward, {(4, 1): 2000.0, (4, 4): 3000.0})
    for rows in (1, 4, 16):
        for _ in range(300):
            forward.observe(rows, 1000.0)
    assert min(costs.plain(2), *costs.told(2), costs.plain(8)) >= 0.0
    assert costs.plain(2) > 0.0


def test_a_plan_s_costs_begin_at_the_plain_step_and_grow_by_what_windows_were_seen_to_add() -> None:
    learned = batch_costs()
    for _ in range(300):
        learned.observe(4, 4, 3000.0, 100.0, drafting=False, waited=False)
    for _ in range(300):
        learned.observe(4, 16, 3000.0 + 2 * 420.0, 100.0, drafting=False, waited=False)
    assert learned.plain(4) == pytest.approx(3100.0, rel=0.01)
    assert learned.of(4)(4) == pytest.approx(3100.0, rel=0.01)
    assert learned.of(4)(16) == pytest.approx(3100.0 + 840.0, rel=0.02)


def test_one_slow_step_of_a_batch_changes_little() -> None:
    learned = batch_costs()
    windows_us, plain_us = learned.of(4)(16) - learned.plain(4), learned.plain(4)
    learned.observe(4, 16, 1e6, 0.0, drafting=False, waited=False)
    assert learned.of(4)(16) - plain_us < 1.7 * windows_us
    learned.observe(4, 4, 1e6, 0.0, drafting=False, waited=False)
    assert learned.plain(4) < 1.02 * plain_us


def test_what_any_window_costs_is_learnt_where_rows_were_measured_to_cost_nothing() -> None:
    """As measured: a step of four sessions takes half as long again with a window of any width, at rest not at all."""
    learned = StepCosts(ForwardTimes({1: 1000.0, 32: 1000.0}), {(4, 1): 2000.0, (4, 4): 2000.0})
    assert learned.of(4)(16) == learned.plain(4) == 2000.0
    for _ in range(100):
        for window in (2, 6, 12):
            learned.observe(4, 4 + window, 3000.0 + 40.0 * window, 0.0, drafting=False, waited=False)
            learned.observe(4, 4, 2000.0, 0.0, drafting=False, waited=False)
    step_us = learned.of(4)
    assert step_us(4) == pytest.approx(2000.0, rel=0.01)
    for window in (1, 8, 16):
        assert step_us(4 + window) - step_us(4) == pytest.approx(1000.0 + 40.0 * window, rel=0.25)


@pytest.mark.parametrize(
    ("between", "theirs"),
    [("nothing", True), ("a drafter", False), ("a step alone", False), ("a prompt", False), ("more sessions", False)],
)
def test_what_windows_leave_behind_is_theirs_if_nothing_else_came_between(between: str, theirs: bool) -> None:
    """As measured: the plain step behind finds other shapes, and chooses among their rows before it."""
    learned = batch_costs()
    plain_us, windows_us = learned.plain(4), learned.of(4)(16) - learned.plain(4)
    behind_us = 0.2 * plain_us
    for _ in range(300):
        learned.observe(4, 16, plain_us + windows_us, 0.0, drafting=False, waited=False)
        match between:
            case "a step alone":
                learned.observe(1, 1, 1000.0, 0.0, drafting=False, waited=False)
            case "a prompt":
                learned.interrupted()
            case "more sessions":
                learned.observe(5, 5, learned.plain(5) + behind_us, 0.0, drafting=False, waited=False)
        learned.observe(4, 4, plain_us + behind_us, 0.0, drafting=between == "a drafter", waited=False)
        for _ in range(3):
            learned.observe(4, 4, plain_us, 0.0, drafting=False, waited=False)
    found_us = learned.of(4)(16) - learned.of(4, behind=False)(16)
    if not theirs:
        assert found_us == pytest.approx(0.0, abs=1.0)
    else:
        assert 0.7 * behind_us < found_us < behind_us, "held to zero as if that had been seen PRIOR_WINDOWS times"
        assert learned.plain(4) == pytest.approx(plain_us, rel=0.01)
        assert learned.of(4, behind=False)(16) - learned.plain(4) == pytest.approx(windows_us, rel=0.02)


def test_a_batch_whose_plain_steps_have_become_longer_learns_so_with_windows_in_every_second_one() -> None:
    """Windows look dear, behind them too: fewer are run, and plain steps show what they take."""
    learned = batch_costs()
    plain_us, windows_us = learned.plain(4), learned.of(4)(16) - learned.plain(4)
    now_us = 1.1 * plain_us
    for step in range(600):
        wide = step % 2 == 0 and learned.of(4)(16) - learned.plain(4) < 1.2 * windows_us
        learned.observe(4, 16 if wide else 4, now_us + (windows_us if wide else 0.0), 0.0, drafting=False, waited=False)
    assert 1.05 * plain_us < learned.plain(4) < 1.01 * now_us
    assert learned.of(4)(16) - learned.plain(4) < 1.3 * windows_us


def test_windows_that_were_dear_for_a_while_are_not_thought_so_for_ever() -> None:
    """They are not run while they are thought too dear, so nothing but time can bring them back."""
    learned = batch_costs()
    plain_us, calm_us = learned.plain(4), learned.of(4)(16) - learned.plain(4)
    for _ in range(100):
        learned.observe(4, 16, plain_us + 3 * calm_us, 0.0, drafting=False, waited=False)
    assert learned.of(4)(16) - plain_us > 1.5 * calm_us
    for _ in range(1000):
        learned.observe(4, 4, plain_us, 0.0, drafting=True, waited=False)
    assert learned.of(4)(16) - plain_us == pytest.approx(calm_us, rel=0.02)


def test_plain_steps_that_were_long_once_are_not_thought_so_for_ever() -> None:
    """Windows would look free beside them, every step would have some, and no plain step would show what it takes."""
    learned = batch_costs()
    plain_us, windows_us = learned.plain(4), learned.of(4)(16) - learned.plain(4)
    for _ in range(300):
        learned.observe(4, 4, 3 * plain_us, 0.0, drafting=False, waited=False)
    for _ in range(300):
        learned.observe(4, 16, plain_us + windows_us, 0.0, drafting=True, waited=False)
    assert learned.plain(4) < 1.02 * (plain_us + windows_us)
    assert learned.of(4)(16) - learned.plain(4) >= 0.5 * windows_us


def test_a_cost_that_is_no_windows_does_not_make_them_dear_beyond_measure() -> None:
    """A window of one row that costs next to nothing, in steps that take 300 us more for whatever else they do."""
    learned = batch_costs()
    for _ in range(300):
        learned.observe(4, 5, learned.plain(4) + 300.0, 0.0, drafting=False, waited=False)
    assert learned.of(4)(16) - learned.plain(4) <= 4.0 * (batch_costs().of(4)(16) - batch_costs().plain(4)) + 1e-6


def test_what_windows_cost_in_large_batches_says_nothing_of_small_ones() -> None:
    learned = batch_costs()
    before_us = learned.of(2)(8)
    for _ in range(100):
        learned.observe(16, 64, 1e4, 0.0, drafting=False, waited=False)
    assert learned.of(16)(64) > 1.2 * batch_costs().of(16)(64)
    assert learned.of(2)(8) == before_us


def test_hiccups_of_the_machine_make_windows_neither_dear_nor_cheap() -> None:
    """Every tenth step takes twice as long, whatever is in it."""
    learned = batch_costs()
    plain_us, windows_us = learned.plain(4), learned.of(4)(16) - learned.plain(4)
    for step in range(2000):
        slow, wide = 2.0 if step % 10 == 3 else 1.0, step % 3 == 0
        took_us = slow * (plain_us + (windows_us if wide else 0.0))
        learned.observe(4, 16 if wide else 4, took_us, 0.0, drafting=False, waited=False)
    assert learned.of(4)(16) - learned.plain(4) == pytest.approx(windows_us, rel=0.15)


def test_several_sessions_are_measured_and_leave_their_slots_empty() -> None:
    lm = load_model("scripted:3", slots=6)
    assert list(calibrate_batches(lm, budget_s=0.0)) == [(4, 1), (4, 4), (6, 1), (6, 4)]
    assert [lm.cached(slot) for slot in range(6)] == [0] * 6
    assert calibrate_batches(load_model("scripted:3", slots=1)) == {}
    assert list(calibrate_batches(load_model("scripted:3", slots=2, context=4), budget_s=0.0)) == [(2, 1)]
