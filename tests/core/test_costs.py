"""V[rows, sessions]: as it is measured at start, and what steps teach of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from specwire.core.model import ModelInfo
from specwire.core.policy.costs import StepCosts
from specwire.core.policy.estimates import ForwardTimes
from specwire.lm import Feed, LanguageModel, load_model, remembered
from specwire.lm.gguf_weights import cache_folder
from specwire.lm.kv_cache import CachedLM, Runner
from verify_service.engine.calibration import (
    CHECKED_FACTOR,
    LONG_WIDTHS,
    WIDTHS,
    BatchShape,
    calibrate,
    calibrate_batches,
    step_costs,
    undisturbed,
)

# ----------------------------------------------------------------------------------------------------------------------
# As measured.


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


def test_calibration_measures_every_width_and_leaves_the_slot_empty() -> None:
    lm = load_model("scripted:3", slots=1)
    times = calibrate(lm, budget_s=0.05)
    assert tuple(times.points) == WIDTHS
    assert all(time > 0 for time in times.points.values())
    assert lm.cached(0) == 0


def test_calibration_fits_a_small_context() -> None:
    assert tuple(calibrate(load_model("scripted:3", slots=1, context=4), budget_s=0.01).points) == (1, 2)


FIRST = 1  # may compile, so it does not count


@pytest.mark.parametrize(
    ("long_us", "measured", "forwards"),
    [
        (1e9, WIDTHS, [FIRST, *WIDTHS, *(width for _ in range(3) for width in WIDTHS for _ in range(2))]),
        (0.0, LONG_WIDTHS, [FIRST, 1, 1, *LONG_WIDTHS, 1, 1, 1]),
    ],
)
def test_long_forwards_are_few_and_measured_once(
    monkeypatch: pytest.MonkeyPatch, long_us: float, measured: tuple[int, ...], forwards: list[int]
) -> None:
    """Whoever has lost another verifier waits for this one. Plain decoding is measured in every round all the same."""
    monkeypatch.setattr("verify_service.engine.calibration.LONG_US", long_us)
    lm = load_model("scripted:3", slots=1)
    fed = counted_forwards(lm, monkeypatch)
    assert tuple(calibrate(lm, budget_s=0.0).points) == measured
    assert fed == [64, *forwards]


def test_one_slow_forward_makes_no_model_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, now = load_model("scripted:3", slots=1), 0
    fed = counted_forwards(lm, monkeypatch)

    def clock() -> int:
        """The second plain forward, the first that counts, takes a second; all others take a millisecond."""
        nonlocal now
        now += 1_000_000_000 if len(fed) == 3 else 500_000
        return now

    monkeypatch.setattr("verify_service.engine.calibration.time.perf_counter_ns", clock)
    assert tuple(calibrate(lm, budget_s=0.0).points) == WIDTHS


def counted_forwards(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each forward from now on."""
    fed: list[int] = []
    forward = lm.forward

    def counted(feeds: Sequence[Feed]) -> torch.Tensor:
        fed.append(sum(len(feed.tokens) for feed in feeds))
        return forward(feeds)

    monkeypatch.setattr(lm, "forward", counted)
    return fed


def test_several_sessions_are_measured_and_leave_their_slots_empty() -> None:
    lm = load_model("scripted:3", slots=6)
    assert list(calibrate_batches(lm, budget_s=0.0)) == [(4, 1), (4, 4), (6, 1), (6, 4)]
    assert [lm.cached(slot) for slot in range(6)] == [0] * 6
    assert calibrate_batches(load_model("scripted:3", slots=1)) == {}
    assert list(calibrate_batches(load_model("scripted:3", slots=2, context=4), budget_s=0.0)) == [(2, 1)]


@pytest.mark.parametrize(
    ("slots", "measured"),
    [
        (3, [(3, 1)]),
        (6, [(4, 1), (4, 4), (6, 1)]),
        (16, [(4, 1), (4, 4), (16, 1)]),
    ],
)
def test_of_several_sessions_plain_steps_and_few_others_are_measured_where_they_are_long(
    slots: int, measured: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verify_service.engine.calibration.LONG_US", 0.0)
    lm = load_model("scripted:3", slots=slots)
    assert list(calibrate_batches(lm, budget_s=0.0)) == measured
    costs = step_costs(lm)
    assert 0 < costs.plain(slots) <= costs.of(slots)(4 * slots)
    assert [lm.cached(slot) for slot in range(slots)] == [0] * slots


# ----------------------------------------------------------------------------------------------------------------------
# As remembered of an earlier start.

SLOTS = 6


class Still(Runner):
    """All logits are zero."""

    decided_by: tuple[object, ...] = ("weights", SLOTS)
    kv_bytes = 0

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        return torch.zeros(sum(max(feed.wanted, 1) for feed in feeds), 8)

    def zero(self, slot: int, stop: int) -> None: ...

    def copy(self, source: int, target: int, stop: int) -> None: ...


def model(decided_by: tuple[object, ...] = Still.decided_by) -> CachedLM:
    runner = Still()
    runner.decided_by = decided_by
    info = ModelInfo("", "", 8, 256, (), "float32", "cpu", "", "", "torch")
    return CachedLM(runner, info, SLOTS)


class Machine:
    """Where forwards take 1,000 us, and so much more for each row and each session beyond the first, times its pace.

    measured: forwards since it was last asked.
    """

    def __init__(self) -> None:
        self.pace, self.row_us, self.hiccups = 1.0, 50.0, list[float]()
        self._forwards = 0

    @property
    def measured(self) -> int:
        found, self._forwards = self._forwards, 0
        return found

    def forward(self, lm: LanguageModel, shape: BatchShape, prefix: int) -> float:
        self._forwards += 1
        slower = self.hiccups.pop() if self.hiccups else 1.0
        return slower * self.us(*shape)

    def us(self, sessions: int, depth: int) -> float:
        return self.pace * (1000.0 + self.row_us * (sessions * depth - 1) + 300.0 * (sessions - 1))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = Machine()
    monkeypatch.setattr("verify_service.engine.calibration._forward", made.forward)
    return made


FEW = 9  # forwards: the first one, and two turns of two shapes


def check_true(found: StepCosts, machine: Machine) -> None:
    """All of V is there, and what the machine takes now."""
    assert tuple(found.forward.points) == WIDTHS
    for sessions, depths in ((1, WIDTHS), (4, (1, 4)), (SLOTS, (1, 4))):
        for depth in depths:
            assert found.measured(sessions, sessions * depth) == pytest.approx(machine.us(sessions, depth))


@pytest.mark.parametrize("pace", [1.0, 3.0, 0.6])
def test_a_later_start_has_what_was_measured_in_proportion_to_a_plain_step(machine: Machine, pace: float) -> None:
    check_true(step_costs(model()), machine)
    assert machine.measured > 10 * FEW
    machine.pace = pace
    lm = model()
    check_true(step_costs(lm), machine)
    assert machine.measured <= FEW
    assert [lm.cached(slot) for slot in range(SLOTS)] == [0] * SLOTS


@pytest.mark.parametrize(("row_us", "pace"), [((700.0, 0.0), 1.0), ((0.0, 700.0), 1.0), ((50.0, 50.0), 0.4)])
def test_windows_that_take_other_shares_of_a_plain_step_and_a_machine_that_did_other_work_are_measured_anew(
    machine: Machine, row_us: tuple[float, float], pace: float
) -> None:
    machine.row_us = row_us[0]
    step_costs(model())
    assert machine.measured
    machine.row_us, machine.pace = row_us[1], pace
    check_true(step_costs(model()), machine)
    assert machine.measured > 10 * FEW
    check_true(step_costs(model()), machine)
    assert machine.measured <= FEW, "what was measured last is remembered"


def test_other_work_of_the_machine_during_the_check_does_not_have_all_measured(machine: Machine) -> None:
    step_costs(model())
    assert machine.measured
    machine.hiccups = [40.0, 1.0]
    check_true(step_costs(model()), machine)
    assert 5 < machine.measured <= FEW


def another_library(patch: pytest.MonkeyPatch) -> tuple[object, ...]:
    patch.setattr(remembered, "_surroundings", lambda: "another library")
    return Still.decided_by


def more_threads(patch: pytest.MonkeyPatch) -> tuple[object, ...]:
    patch.setattr(torch, "get_num_threads", lambda: 99)
    return Still.decided_by


def fewer_cores(patch: pytest.MonkeyPatch) -> tuple[object, ...]:
    patch.setattr("os.sched_getaffinity", lambda _: set(range(99)))
    return Still.decided_by


@pytest.mark.parametrize(
    "change",
    [another_library, more_threads, fewer_cores, lambda _: ("other weights", SLOTS), lambda _: ("weights", SLOTS + 1)],
)
def test_whatever_decides_it_has_it_measured_anew(
    machine: Machine, change: Callable[[pytest.MonkeyPatch], tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    step_costs(model())
    assert machine.measured
    machine.row_us = 55.0  # not enough to be found out by a check
    check_true(step_costs(model(change(monkeypatch))), machine)
    assert machine.measured > 10 * FEW


def test_a_model_of_which_nothing_tells_what_decides_it_is_measured_each_time(machine: Machine) -> None:
    for _ in range(2):
        check_true(step_costs(model(())), machine)
        assert machine.measured > 10 * FEW
    assert not list(cache_folder().rglob("*"))


@pytest.mark.parametrize(
    "content", [b"", b"7", b"{}", b"[]", b"[[1, 2, 5.0]]", b"[[1, 1]]", b"[[1, 1, 0.0]]", b"[[1, 1, NaN]]"]
)
def test_what_is_no_table_is_measured_anew(machine: Machine, content: bytes) -> None:
    step_costs(model())
    assert machine.measured
    (kept,) = (cache_folder() / remembered.FOLDER).iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(content)
    check_true(step_costs(model()), machine)
    assert machine.measured > 10 * FEW
    assert kept.read_bytes() == whole


def test_without_a_folder_it_is_measured_each_time(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", __file__)
    for _ in range(2):
        check_true(step_costs(model()), machine)
        assert machine.measured > 10 * FEW


def test_steps_go_on_to_correct_what_was_remembered(machine: Machine) -> None:
    step_costs(model())
    machine.row_us = 150.0  # windows of four take 1.26 times as long, within CHECKED_FACTOR
    assert machine.us(1, 4) < CHECKED_FACTOR * 1150.0
    found = step_costs(model())
    assert found.of(1)(4) == pytest.approx(1150.0)
    for _ in range(200):
        observe(found, 1, machine.us(1, 1))
        observe(found, 4, machine.us(1, 4))
    assert found.of(1)(4) == pytest.approx(machine.us(1, 4), rel=0.01)


# ----------------------------------------------------------------------------------------------------------------------
# Of several sessions.


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
    """What was taken from a hiccup while V(m) was measured for further sessions is not to make a step take none."""
    costs = StepCosts(ForwardTimes({1: 30_000.0, 16: 30_000.0}), {(4, 1): 2000.0, (4, 4): 3000.0})
    assert min(costs.plain(2), costs.plain(8), costs.of(2)(4)) > 0.0


# ----------------------------------------------------------------------------------------------------------------------
# What plain steps teach.


def costs() -> StepCosts:
    return StepCosts(ForwardTimes({1: 1000.0, 4: 1300.0}))


def observe(learned: StepCosts, rows: int, took_us: float, times: int = 1, sessions: int = 1) -> None:
    for _ in range(times):
        learned.observe(sessions, rows, took_us, 0.0, waited=False)


def test_a_plain_step_is_the_forward_and_the_software_around_it() -> None:
    learned = costs()
    assert learned.plain(1) == 1000.0
    for _ in range(10):
        assert learned.observe(1, 1, 1000.0, 200.0, waited=False) is None
    assert learned.plain(1) == pytest.approx(1200.0, rel=0.01)
    assert learned.observe(1, 1, 1000.0, 200.0, waited=True) == pytest.approx(1200.0, rel=0.01), "it waited"


def test_what_is_around_a_forward_never_counts_for_more_than_the_forward() -> None:
    learned = costs()
    for _ in range(20):
        learned.observe(1, 1, 1000.0, 9000.0, waited=False)
    assert learned.plain(1) == pytest.approx(2000.0, rel=0.01)


def test_a_batch_that_was_not_seen_is_as_slow_as_the_next_one_that_was() -> None:
    learned = batch_costs()
    observe(learned, 16, 2 * 2650.0, 300, sessions=16)
    assert batch_costs().plain(16) == pytest.approx(2650.0)
    assert learned.plain(14) == pytest.approx(2 * batch_costs().plain(14), rel=0.01)


def test_a_machine_that_has_become_slower_or_faster_shows_so_by_plain_steps_alone() -> None:
    for factor in (2.0, 0.5):
        learned = costs()
        observe(learned, 4, factor * 1300.0, 30)
        assert learned.seen(1).pace == 1.0, "it may be the windows"
        observe(learned, 1, factor * 1000.0, 6)
        assert learned.plain(1) == pytest.approx(factor * 1000.0, rel=0.02)


def test_plain_steps_that_were_long_once_are_not_thought_so_for_ever() -> None:
    """Windows would look free beside them, every step would have some, and no plain step would show what it takes."""
    learned = batch_costs()
    plain_us, window_us = learned.plain(4), learned.of(4)(16)
    observe(learned, 4, 3 * plain_us, 300, sessions=4)
    for _ in range(300):
        observe(learned, *((4, plain_us) if learned.seen(4).plain_due else (16, window_us)), sessions=4)
    assert learned.plain(4) < 1.1 * plain_us
    assert learned.of(4)(16) == pytest.approx(window_us, rel=0.1)


# ----------------------------------------------------------------------------------------------------------------------
# What windows teach, beside plain steps.


def test_what_a_width_takes_beside_a_plain_step_shows_where_one_follows_the_other() -> None:
    learned = StepCosts(ForwardTimes({1: 1000.0, 2: 1100.0, 4: 1300.0}))
    for step in range(200):
        slowness = 2.0 if step // 20 % 2 else 1.0
        observe(learned, 1, slowness * 1000.0)
        observe(learned, 4, slowness * 1600.0)
    assert learned.of(1)(4) / learned.plain(1) == pytest.approx(1.6, rel=0.02)
    assert learned.of(1)(2) / learned.plain(1) == pytest.approx(1.1 * 1.6 / 1.3, rel=0.02), "of others as much"


def test_what_a_busy_machine_made_of_windows_is_outvoted() -> None:
    learned = StepCosts(ForwardTimes({1: 1000.0, 2: 1200.0, 4: 1400.0}))
    for _ in range(20):
        observe(learned, 1, 1000.0)
        observe(learned, 2, 90_000.0)
    assert learned.of(1)(2) == pytest.approx(2.0 * learned.plain(1)), "two plain steps would do the same"
    for _ in range(4):
        observe(learned, 1, 1000.0)
        observe(learned, 2, 1200.0)
    assert [learned.of(1)(rows) for rows in (1, 2, 4)] == pytest.approx([1000.0, 1200.0, 1400.0], rel=0.2)


def test_a_hiccup_in_every_third_step_hides_no_width() -> None:
    learned = StepCosts(ForwardTimes({1: 1000.0, 2: 1900.0, 4: 2800.0}))
    for step in range(30):
        observe(learned, 1, 1000.0)
        observe(learned, 4, 1400.0 * (30.0 if step % 3 == 0 else 1.0))
    assert learned.of(1)(4) / learned.plain(1) == pytest.approx(1.4, rel=0.02)
    assert learned.of(1)(2) <= learned.of(1)(4), "measured while something else ran"


@pytest.mark.parametrize(("plain_us", "share"), [(1000.0, 2.6), (2000.0, 1.3)])
@pytest.mark.parametrize("sessions", [1, 4])
def test_a_plain_step_is_due_that_shows_whether_windows_or_the_machine_take_longer(
    sessions: int, plain_us: float, share: float
) -> None:
    """Windows take twice as long as measured."""
    measured = {(4, 1): 1000.0, (4, 4): 1300.0} if sessions > 1 else {}
    learned = StepCosts(ForwardTimes({1: 1000.0, 4: 1300.0}) if sessions == 1 else ForwardTimes({1: 1000.0}), measured)
    due = []
    for step in range(200):
        if learned.seen(sessions).plain_due:
            due.append(step)
            observe(learned, sessions, plain_us, 1, sessions)
        else:
            observe(learned, 4 * sessions, 2600.0, 1, sessions)
    assert due[:1] == [4]
    assert len(due) < 6
    assert learned.of(sessions)(4 * sessions) / learned.plain(sessions) == pytest.approx(share, rel=0.01)
    assert learned.plain(sessions) == pytest.approx(plain_us, rel=0.1)


@pytest.mark.parametrize("dearer", [1.2, 1.5, 2.0])
def test_windows_that_become_dearer_later_are_not_taken_for_a_slow_machine(dearer: float) -> None:
    """As when another process begins to share the caches: steps have windows, but for due ones."""
    learned = StepCosts(ForwardTimes({1: 1000.0, 4: 1100.0}))
    for _ in range(20):
        observe(learned, 1, 1000.0)
        observe(learned, 4, 1100.0)
    for _ in range(2000):
        observe(learned, *((1, 1000.0) if learned.seen(1).plain_due else (4, 1100.0 * dearer)))
    assert learned.plain(1) == pytest.approx(1000.0, rel=0.1)
    assert learned.of(1)(4) == pytest.approx(1100.0 * dearer, rel=0.1)


def test_what_any_window_costs_is_learnt_where_rows_were_measured_to_cost_nothing() -> None:
    """As measured: a step of four sessions takes half as long again with a window of any width, at rest not at all."""
    learned = StepCosts(ForwardTimes({1: 1000.0, 32: 1000.0}), {(4, 1): 2000.0, (4, 4): 2000.0})
    assert learned.of(4)(16) == learned.plain(4) == 2000.0
    for _ in range(100):
        for window in (2, 6, 12):
            observe(learned, 4 + window, 3000.0 + 40.0 * window, sessions=4)
            observe(learned, 4, 2000.0, sessions=4)
    step_us = learned.of(4)
    assert step_us(4) == pytest.approx(2000.0, rel=0.01)
    for window in (2, 8, 16):
        assert step_us(4 + window) == pytest.approx(3000.0 + 40.0 * window, rel=0.15)


def test_what_windows_cost_in_large_batches_says_nothing_of_small_ones() -> None:
    learned = batch_costs()
    before_us = learned.of(2)(8)
    for _ in range(100):
        observe(learned, 64, 1e4, sessions=16)
        observe(learned, 16, 2650.0, sessions=16)
    assert learned.of(16)(64) > 1.2 * batch_costs().of(16)(64)
    assert learned.of(2)(8) == before_us


def test_what_does_not_follow_each_other_is_not_compared() -> None:
    learned = costs()
    for _ in range(20):
        observe(learned, 1, 1000.0)
        learned.interrupted()
        observe(learned, 4, 3000.0)
        observe(learned, 2, 1500.0, sessions=2)
    assert learned.of(1)(4) / learned.plain(1) == pytest.approx(1.3)


def test_hiccups_of_the_machine_make_windows_neither_dear_nor_cheap() -> None:
    """Every tenth step takes twice as long, whatever is in it."""
    learned = batch_costs()
    plain_us, window_us = learned.plain(4), learned.of(4)(16)
    for step in range(2000):
        slow, wide = 2.0 if step % 10 == 3 else 1.0, step % 3 == 0
        observe(learned, 16 if wide else 4, slow * (window_us if wide else plain_us), sessions=4)
    assert learned.of(4)(16) / learned.plain(4) == pytest.approx(window_us / plain_us, rel=0.05)


def test_a_step_is_charged_for_what_such_windows_take_whatever_it_took() -> None:
    learned = costs()
    observe(learned, 4, 11_300.0)
    assert learned.windows_us(1, 4) == pytest.approx(300.0)
    assert learned.windows_us(1, 1) == 0.0, "a plain step is charged for nothing"
