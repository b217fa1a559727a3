"""Turns are fair between tenants, and by priority and arrival within one."""

from __future__ import annotations

from collections import Counter

from specwire.core.admission import Waiting, next_in_turn


def order(waiting: list[Waiting], places: dict[bytes, int]) -> list[int]:
    """Arrival numbers in the order in which places are given, each of which stays taken."""
    taken, left, turns = Counter(places), list(waiting), []
    while (chosen := next_in_turn(left, taken)) is not None:
        left.remove(chosen)
        taken[chosen.scope] += 1
        turns.append(chosen.arrival)
    return turns


def test_nobody_waits() -> None:
    assert next_in_turn([], {}) is None


def test_within_a_tenant_the_most_urgent_then_the_first() -> None:
    assert order([Waiting(b"a", 0, 1), Waiting(b"a", 5, 2), Waiting(b"a", -1, 3), Waiting(b"a", 5, 4)], {}) == [
        2,
        4,
        1,
        3,
    ]


def test_a_crowd_of_one_tenant_does_not_hold_up_another_however_urgent_it_says_it_is() -> None:
    crowd = [Waiting(b"a", 100, arrival) for arrival in range(4)]
    assert order([*crowd, Waiting(b"b", -100, 9)], {b"a": 1}) == [9, 0, 1, 2, 3]
    assert order([*crowd, Waiting(b"b", 0, 9), Waiting(b"b", 0, 10)], {}) == [0, 9, 1, 10, 2, 3]
