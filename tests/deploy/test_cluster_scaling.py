"""How many replicas a load gets: single decisions, and a simulated day."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.cluster.scaling import PoolLoad, ScalingState, decide
from deploy.cluster.schema import ScalingRule

RULE = ScalingRule(least=1, most=4)
SLOTS = 16
STEP_S = 5.0


def reading(replicas: int, demand: int) -> PoolLoad:
    slots = replicas * SLOTS
    return PoolLoad(replicas, min(demand, slots), max(0, demand - slots), slots)


def play(rule: ScalingRule, demands: list[int], count: int = 1) -> list[int]:
    """Replicas after each look at the demand of that moment; what is asked for is there at the next."""
    memory, counts = ScalingState(), []
    for look, demand in enumerate(demands):
        count, memory = decide(rule, memory, reading(count, demand), look * STEP_S)
        counts.append(count)
    return counts


def looked(rule: ScalingRule, seen: list[PoolLoad]) -> list[int]:
    """What each look asks for."""
    memory, counts = ScalingState(), []
    for look, each in enumerate(seen):
        count, memory = decide(rule, memory, each, look * STEP_S)
        counts.append(count)
    return counts


def test_a_queue_that_stays_gets_what_it_needs_at_once() -> None:
    counts = play(RULE, [40] * 10)
    assert counts[:3] == [1, 1, 3]
    assert set(counts[2:]) == {3}
    assert math.ceil(40 / (RULE.high * SLOTS)) == 3


@pytest.mark.parametrize(("demands", "count"), [([20, 10] * 40, 1), ([20] * 500, 2)])
def test_a_queue_that_passes_changes_nothing_nor_does_what_is_between_high_and_low(
    demands: list[int], count: int
) -> None:
    assert set(play(RULE, demands, count)) == {count}


def test_an_empty_pool_shrinks_slowly_one_by_one() -> None:
    counts = play(RULE, [0] * 200, count=4)
    looks = [counts.index(wanted) for wanted in (3, 2, 1)]
    assert looks == [60, 120, 180]
    assert counts[-1] == 1


def test_sessions_that_wait_too_long_count_although_there_are_slots() -> None:
    waits = replace(reading(2, 20), queue_s=RULE.queue_s + 0.1)
    assert looked(RULE, [waits] * 3) == [2, 2, 3]
    assert looked(RULE, [replace(waits, queue_s=RULE.queue_s)] * 9) == [2] * 9


def test_nothing_shrinks_while_somebody_waits() -> None:
    quiet = replace(reading(2, 0), queue_s=RULE.queue_s + 0.1, replicas=2)
    rule = replace(RULE, most=2)
    assert looked(rule, [quiet] * 100) == [2] * 100
    assert min(looked(rule, [replace(quiet, queue_s=0.0)] * 100)) == 1


def test_what_is_being_started_is_not_asked_for_twice() -> None:
    starting = PoolLoad(2, 16, 8, 16, queue_s=9.0, ready=1)
    assert looked(RULE, [starting] * 20) == [2] * 20
    there = PoolLoad(2, 16, 16, 32, queue_s=9.0)
    assert looked(RULE, [*[starting] * 9, there, there, there]) == [2] * 11 + [3]


def test_what_is_away_does_not_keep_a_pool_large() -> None:
    assert looked(RULE, [PoolLoad(3, 2, 0, 32, ready=2)] * 61)[-1] == 2


@pytest.mark.parametrize(("there", "least", "most", "wanted"), [(0, 1, 4, 1), (6, 1, 4, 4), (1, 2, 4, 2)])
def test_bounds_are_kept_at_once(there: int, least: int, most: int, wanted: int) -> None:
    assert decide(ScalingRule(least, most), ScalingState(), reading(there, 5), 0.0)[0] == wanted


def test_replicas_that_say_nothing_are_left_alone() -> None:
    assert decide(RULE, ScalingState(0.0, 0.0), PoolLoad(2, 0, 0, 0), 1e9)[0] == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"least": 2, "most": 1},
        {"least": 0, "most": 0},
        {"high": 0.5, "low": 0.8},
        {"high": 1.2},
        {"grow_after_s": -1.0},
        {"queue_s": -1.0},
    ],
)
def test_a_rule_that_makes_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must "):
        replace(RULE, **wrong)  # type: ignore[arg-type]  # of a test


def test_a_day_of_load_is_followed_without_flapping() -> None:
    """A wave of two hours with noise, four times: who waits is few, and replicas come and go with the wave only."""
    noise = random.Random(11)
    demands = [
        max(0, round(26 + 24 * math.sin(look * STEP_S / 7200 * math.tau) + noise.gauss(0, 2)))
        for look in range(4 * 1440)
    ]
    counts = play(RULE, demands)
    moves = sum(1 for before, after in pairwise(counts) if before != after)
    waiting = sum(1 for count, demand in zip(counts, demands, strict=True) if demand > count * SLOTS)
    assert {1, 4} <= set(counts)
    assert moves <= 4 * 2 * 4
    assert waiting <= len(demands) // 50
    assert sum(counts) < 0.85 * 4 * len(counts)


@given(demand=st.integers(0, 64), count=st.integers(1, 4))
def test_a_steady_load_comes_to_rest(demand: int, count: int) -> None:
    counts = play(RULE, [demand] * 400, count)
    assert len(set(counts[-150:])) == 1
