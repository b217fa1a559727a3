"""Which peer a session gets, and whose turn it is where sessions wait."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from specwire.core.invalid import InvalidParameter

# ----------------------------------------------------------------------------------------------------------------------
# Which verifier gets a session, and which drafter. Pure.
#
# What counts, before what is behind it:
#
# 0. Who is not about to stop.
# 1. Who has the session's keys and values, or its parent's: any other one would compute them again.
# 2. Drafters: how often each has refused the session.
# 3. A heartbeat that came in time.
# 4. Room.
# 5. Nearness: the first of the wished regions, then the second, then any.
# 6. Load: sessions there, those that wait included, by slots.
#
# Among many who are alike up to here, `PlacementRequest.draws` are compared by load: all, where one orchestrator places
# all sessions and so knows the loads: the least loaded one is best. Two at random, where several orchestrators know the
# loads by hearsay: else all of them send what comes between two heartbeats to the same one, which was the least loaded
# of all. Two choices are nearly as good as all (Mitzenmacher, "The power of two choices in randomized load balancing",
# 2001).

# How many are compared by load where others place sessions, too.
TWO = 2


@dataclass(frozen=True, slots=True)
class PlacementCandidate:
    """A service as its orchestrator knows it now.

    name: where it is dialled, or what it is called. fingerprint: of a verifier's model, a drafter's vocabulary.
    context: the longest text that it holds, in tokens; it has a say where the wish has one.
    up: it can be used. draining: it is about to stop, and takes a session that nobody else can have.
    fresh: its heartbeat came in time, or nobody asks for one.
    slots: sessions it can hold; of 0 it is not known. sessions: those it has, waiting ones and others' included.
    region: where it is; "" is not said. refusals: of this session.
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

    @property
    def has_room(self) -> bool:
        return self.sessions < self.slots

    @property
    def load(self) -> float:
        return self.sessions / max(1, self.slots)


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What a session needs.

    key: what the random choice depends on, so that it can be made again. fingerprint: as of a candidate.
    held_by: who has its keys and values, by name: it needs no further room there. parent_at: who has its parent's, and
    gets it if there is room.
    near: regions, the nearest first. context: the length that the text may come to; 0 of whom that does not concern.
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
    """Who gets the session; None if nobody can have it. Among equals the first one does."""
    fit = {index: each for index, each in enumerate(candidates) if _fits(each, wish)}
    fit = {index: each for index, each in fit.items() if not each.draining} or fit
    if not fit:
        return None
    holder = _holder(fit, wish)
    if holder is not None:
        return Placement(holder, Reason.HOLDER)
    classes = {index: _class(each, wish) for index, each in fit.items()}
    best = min(classes.values())
    alike = {index: each for index, each in fit.items() if classes[index] == best}
    chosen = min(_drawn(alike, wish), key=lambda index: alike[index].load)
    if len(fit) == 1:
        return Placement(chosen, Reason.ONLY)
    farther = any(of[:-1] == best[:-1] and of != best for of in classes.values())
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


def _class(candidate: PlacementCandidate, wish: PlacementRequest) -> tuple[int, bool, bool, int]:
    """The smallest is served first."""
    distance = wish.near.index(candidate.region) if candidate.region in wish.near else len(wish.near)
    return candidate.refusals, not candidate.fresh, not candidate.has_room, distance


def _drawn(alike: Mapping[int, PlacementCandidate], wish: PlacementRequest) -> list[int]:
    """Indices of the candidates that are compared by load, in the given order."""
    if not 0 < wish.draws < len(alike):
        return list(alike)
    taken = sorted(alike, key=lambda index: _lot(wish.key, alike[index].name))
    return sorted(taken[: wish.draws])


def _lot(key: str, name: str) -> bytes:
    """Random in key and name, and the same wherever it is drawn."""
    return hashlib.blake2b(f"{len(key)}:{key}{name}".encode(), digest_size=8).digest()


# ----------------------------------------------------------------------------------------------------------------------
# Whose turn it is when a place comes free. Pure.

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
