"""Turns are fair between tenants, and by priority and arrival within one."""

from __future__ import annotations

from collections import Counter

import pytest

from specwire.core.invalid import InvalidParameter
from specwire.core.placement import Waiting, check_priority, next_in_turn


def order(waiting: list[Waiting], places: dict[bytes, int], stay: bool = True) -> list[int]:
    """Arrival numbers in the order in which places are given; each stays taken, or is free again at once."""
    taken, latest, left = Counter(places), dict[bytes, int](), list(waiting)
    turns: list[int] = []
    while (chosen := next_in_turn(left, taken, latest)) is not None:
        left.remove(chosen)
        taken[chosen.scope] += stay
        latest[chosen.scope] = len(turns)
        turns.append(chosen.arrival)
    return turns


def test_nobody_waits() -> None:
    assert next_in_turn([], {}, {}) is None


def test_within_a_tenant_the_most_urgent_then_the_first() -> None:
    crowd = [Waiting(b"a", priority, arrival) for arrival, priority in enumerate((0, 5, -1, 5))]
    assert order(crowd, {}) == [1, 3, 0, 2]


@pytest.mark.parametrize("stay", [True, False])
def test_a_crowd_of_one_tenant_does_not_hold_up_another_however_urgent_it_says_it_is(stay: bool) -> None:
    crowd = [Waiting(b"a", 100, arrival) for arrival in range(4)]
    assert order([*crowd, Waiting(b"b", -100, 9)], {b"a": 1}, stay) == [9, 0, 1, 2, 3]
    turns = order([*crowd, Waiting(b"b", 0, 9), Waiting(b"b", 0, 10)], {}, stay)
    assert turns == [0, 9, 1, 10, 2, 3]


@pytest.mark.parametrize("priority", [-101, 101, 1 << 30])
def test_priorities_have_bounds(priority: int) -> None:
    with pytest.raises(InvalidParameter, match=f"priority: must be from -100 to 100, not {priority}"):
        check_priority(priority)
    assert (check_priority(-100), check_priority(100)) == (-100, 100)
