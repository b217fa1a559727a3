"""Whose turn it is when a place comes free. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specwire.core.sampling import InvalidParameter

MOST_PRIORITY = 100


def check_priority(priority: int) -> int:
    """The priority itself; raises InvalidParameter."""
    if not -MOST_PRIORITY <= priority <= MOST_PRIORITY:
        raise InvalidParameter("priority", f"must be from {-MOST_PRIORITY} to {MOST_PRIORITY}, not {priority}")
    return priority


@dataclass(frozen=True, slots=True)
class Waiting:
    """arrival: numbers that rise."""

    scope: bytes
    priority: int
    arrival: int


def next_in_turn(
    waiting: Iterable[Waiting], places: Mapping[bytes, int], latest: Mapping[bytes, int]
) -> Waiting | None:
    """The one that goes first: of the scope with the fewest `places`, the most urgent, then the one that came first.

    Of scopes with as many places it is the one whose `latest` turn is longest ago. A scope is a tenant. Priorities
    order what one tenant has waiting; none gets ahead of another by claiming to be urgent.
    """

    def key(each: Waiting) -> tuple[int, int, int, int]:
        return places.get(each.scope, 0), latest.get(each.scope, -1), -each.priority, each.arrival

    return min(waiting, key=key, default=None)
