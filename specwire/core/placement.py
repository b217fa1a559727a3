"""Which peer a session gets, and whose turn it is where sessions wait."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from specwire.core.invalid import InvalidParameter

# ----------------------------------------------------------------------------------------------------------------------
# Which verifier and which drafter a session gets. Pure. In order of importance:
#
# 0. Not about to stop.
# 1. Has the session's keys and values, or its parent's: any other one would compute them again.
# 2. How often each has refused the session.
# 3. A heartbeat that came in time.
# 4. Room.
# 5. Drafters: the session's vocabulary, before one that has to be mapped.
# 6. Nearness: the first of the wished regions, then the second, then any; of one region those whose messages take
#    about as long as the nearest one's.
# 7. Load: sessions there, those that wait included, by slots.
#
# Among those that are equal up to here, `PlacementRequest.draws` are compared by load. Where one orchestrator places
# all sessions it knows the loads, and compares all. Where several do, they learn the loads late, and compare two at
# random: else all of them would send the sessions between two heartbeats to the same service. Two choices are nearly as
# good as all (Mitzenmacher, "The power of two choices in randomized load balancing", 2001).

# Services of one region are near if their round trip is at most so many times the least one and so many microseconds:
# less than what differs from one measurement to the next, or than a step takes.
NEAR_FACTOR, NEAR_US = 1.25, 5_000.0

# How many are compared by load where other orchestrators place sessions, too.
TWO = 2


@dataclass(frozen=True, slots=True)
class PlacementCandidate:
    """A service as its orchestrator knows it now.

    name: where it is dialled, or what it is called. fingerprint: of a verifier's model, a drafter's vocabulary.
    context: the longest text that it holds, in tokens; it counts where the request has one. up: it can be used.
    draining: it is about to stop, and takes a session only if nobody else can. fresh: its heartbeat came in time, or
    none is needed. slots: sessions it can hold; 0 is unknown. sessions: those it has, waiting ones and those of other
    orchestrators included. region: where it is; "" is unknown. refusals: of this session. mapped: a drafter that has
    another vocabulary, and maps the session's. round_trip_us: as measured; 0 is unknown.
    """

    name: str
    fingerprint: str
    up: bool = True
    draining: bool = False
    fresh: bool = True
    slots: int = 1
    sessions: int = 0
    region: str = ""
    refusals: int = 0
    context: int = 0
    mapped: bool = False
    round_trip_us: float = 0.0

    @property
    def has_room(self) -> bool:
        return self.sessions < self.slots

    @property
    def load(self) -> float:
        return self.sessions / max(1, self.slots)


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What a session needs.

    key: what the random choice depends on, so that it can be repeated. fingerprint: as of a candidate. held_by: the
    name of the one that has its keys and values; it needs no further slot there. parent_at: likewise for its parent's;
    it gets the session if it has room. near: regions, the nearest first. context: the greatest length of the text; 0
    for drafters.
    draws: how many are compared by load; 0 compares all.
    """

    key: str
    fingerprint: str
    held_by: str = ""
    parent_at: str = ""
    near: tuple[str, ...] = ()
    draws: int = 0
    context: int = 0


class Reason(StrEnum):
    """Why a candidate was chosen; each a value of a metric's label."""

    HOLDER = "holds the cache"
    ONLY = "the only one"
    NEAR = "nearer"
    LOAD = "less load"


@dataclass(frozen=True, slots=True)
class Placement:
    """`index` among the candidates, in the order in which they were given."""

    index: int
    reason: Reason


def place(candidates: Sequence[PlacementCandidate], wish: PlacementRequest) -> Placement | None:
    """The candidate that gets the session; None if none can have it. Among equals it is the first."""
    fit = {index: each for index, each in enumerate(candidates) if _fits(each, wish)}
    fit = {index: each for index, each in fit.items() if not each.draining} or fit
    if not fit:
        return None
    holder = _holder(fit, wish)
    if holder is not None:
        return Placement(holder, Reason.HOLDER)
    classes = {index: _class(each, wish) for index, each in fit.items()}
    best = min(classes.values())
    equal = {index: each for index, each in fit.items() if classes[index] == best}
    alike = _nearest(equal)
    chosen = min(_drawn(alike, wish), key=lambda index: alike[index].load)
    if len(fit) == 1:
        return Placement(chosen, Reason.ONLY)
    farther = any(of[:-1] == best[:-1] and of != best for of in classes.values())
    farther = farther or len(alike) < len(equal)
    return Placement(chosen, Reason.NEAR if len(alike) == 1 and farther else Reason.LOAD)


def _fits(candidate: PlacementCandidate, wish: PlacementRequest) -> bool:
    equal = candidate.fingerprint == wish.fingerprint
    return candidate.up and equal and candidate.context >= wish.context


def _holder(fit: Mapping[int, PlacementCandidate], wish: PlacementRequest) -> int | None:
    by_name = {each.name: index for index, each in fit.items()}
    if wish.held_by in by_name:
        return by_name[wish.held_by]
    parent = by_name.get(wish.parent_at)
    return parent if parent is not None and fit[parent].has_room else None


def _class(candidate: PlacementCandidate, wish: PlacementRequest) -> tuple[int, bool, bool, bool, int]:
    """Sort key: the smallest is chosen."""
    distance = wish.near.index(candidate.region) if candidate.region in wish.near else len(wish.near)
    return candidate.refusals, not candidate.fresh, not candidate.has_room, candidate.mapped, distance


def _nearest(equal: Mapping[int, PlacementCandidate]) -> dict[int, PlacementCandidate]:
    """Without those that are measurably farther than the nearest; one that was not measured may be near."""
    least = min((each.round_trip_us for each in equal.values() if each.round_trip_us > 0), default=0.0)
    return {index: each for index, each in equal.items() if each.round_trip_us <= NEAR_FACTOR * least + NEAR_US}


def _drawn(alike: Mapping[int, PlacementCandidate], wish: PlacementRequest) -> list[int]:
    """Indices of the candidates that are compared by load, in the given order; drawn ones in the order of their lots.

    So those of equal load share the sessions of all who place some.
    """
    if not wish.draws:
        return list(alike)
    return sorted(alike, key=lambda index: _lot(wish.key, alike[index].name))[: wish.draws]


def _lot(key: str, name: str) -> bytes:
    """Random in key and name, and the same wherever it is drawn."""
    return hashlib.blake2b(f"{len(key)}:{key}{name}".encode(), digest_size=8).digest()


# ----------------------------------------------------------------------------------------------------------------------
# Whose turn it is when a slot comes free. Pure.

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
