"""How many replicas a load gets: single decisions, and a simulated day."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.cluster.planning import ReplicaName
from deploy.cluster.replica import Place
from deploy.cluster.scaling import Memory, Reading, Rule, decide
from deploy.cluster.schema import parse
from deploy.cluster.watch import readings, wanted
from specwire.registry.entry import Entry, Load, Role

RULE = Rule(least=1, most=4)
SLOTS = 16
STEP_S = 5.0


def reading(replicas: int, demand: int) -> Reading:
    slots = replicas * SLOTS
    return Reading(replicas, min(demand, slots), max(0, demand - slots), slots)


def play(rule: Rule, demands: list[int], count: int = 1) -> list[int]:
    """Replicas after each look at the demand of that moment; what is asked for is there at the next."""
    memory, counts = Memory(), []
    for look, demand in enumerate(demands):
        count, memory = decide(rule, memory, reading(count, demand), look * STEP_S)
        counts.append(count)
    return counts


def test_a_queue_that_stays_gets_what_it_needs_at_once() -> None:
    counts = play(RULE, [40] * 10)
    assert counts[:3] == [1, 1, 3]
    assert set(counts[2:]) == {3}
    assert math.ceil(40 / (RULE.high * SLOTS)) == 3


def test_a_queue_that_passes_changes_nothing() -> None:
    assert set(play(RULE, [20, 10, 20, 10] * 20)) == {1}


def test_an_empty_pool_shrinks_slowly_one_by_one() -> None:
    counts = play(RULE, [0] * 200, count=4)
    looks = [counts.index(wanted) for wanted in (3, 2, 1)]
    assert looks == [60, 120, 180]
    assert counts[-1] == 1


def test_between_high_and_low_nothing_moves() -> None:
    assert set(play(RULE, [20] * 500, count=2)) == {2}


@pytest.mark.parametrize(("there", "least", "most", "wanted"), [(0, 1, 4, 1), (6, 1, 4, 4), (1, 2, 4, 2)])
def test_bounds_are_kept_at_once(there: int, least: int, most: int, wanted: int) -> None:
    assert decide(Rule(least, most), Memory(), reading(there, 5), 0.0)[0] == wanted


def test_replicas_that_say_nothing_are_left_alone() -> None:
    assert decide(RULE, Memory(0.0, 0.0), Reading(2, 0, 0, 0), 1e9)[0] == 2


@pytest.mark.parametrize("wrong", [(2, 1, 0.8, 0.5), (0, 0, 0.8, 0.5), (1, 2, 0.5, 0.8), (1, 2, 1.2, 0.5)])
def test_a_rule_that_makes_no_sense(wrong: tuple[int, int, float, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Rule(*wrong)


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


@given(demands=st.lists(st.integers(0, 200), min_size=1, max_size=200), count=st.integers(0, 9))
def test_it_stays_within_its_bounds(demands: list[int], count: int) -> None:
    assert all(RULE.least <= each <= RULE.most for each in play(RULE, demands, count))


@given(demand=st.integers(0, 64), count=st.integers(1, 4))
def test_a_steady_load_comes_to_rest(demand: int, count: int) -> None:
    counts = play(RULE, [demand] * 400, count)
    assert len(set(counts[-150:])) == 1


def test_a_pool_is_read_in_the_registry() -> None:
    config = parse('{redis: "redis://a:1", pools: {large: {kind: verify, model: "scripted:7", max_replicas: 3}}}')
    names = [ReplicaName("large", "00", number) for number in range(2)]
    entry = Entry("0" * 32, Role.VERIFIER, "a:1", slots=4, load=Load(4, 2, 0))
    found = readings({names[0]: Place("a:1", "n"), names[1]: None}, [entry])
    assert found == {"large": Reading(2, 4, 2, 4)}
    memories = {"large": Memory()}
    assert wanted(config, memories, found, 0.0) == {"large": 2}
    assert memories["large"].full_since == 0.0
    assert wanted(config, memories, found, 10.0) == {"large": 3}
