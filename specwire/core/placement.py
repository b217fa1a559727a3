"""Which verifier gets a session, and which drafter. Pure.

What counts, before what is behind it:

1. Who has the session's keys and values, or its parent's: any other one would compute them again.
2. Drafters: how often each has refused the session.
3. A heartbeat that came in time.
4. Room.
5. Nearness: the first of the wished regions, then the second, then any.
6. Load: sessions there, those that wait included, by slots.

Of many who are alike up to there, `Wish.draws` are compared by load. All of them, where one orchestrator places all
sessions and so knows the loads: the least loaded one is best. Two at random, where several orchestrators know the loads
by hearsay: else all of them send what comes between two heartbeats to the same one, which was the least loaded of all.
Two choices are nearly as good as all (Mitzenmacher, "The power of two choices in randomized load balancing", 2001).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

# How many are compared by load where others place sessions, too.
TWO = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A service as its orchestrator knows it now.

    name: no two are called the same. fingerprint: of a verifier's weights, a drafter's vocabulary.
    up: it can be used. draining: it is about to stop. fresh: its heartbeat came in time, or nobody asks for one.
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

    @property
    def has_room(self) -> bool:
        return self.sessions < self.slots

    @property
    def load(self) -> float:
        return self.sessions / max(1, self.slots)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a session needs.

    key: what the random choice depends on, so that it can be made again. fingerprint: as of a candidate.
    holders: names of those that have its keys and values, or a part, the best first; taken if they have room.
    near: regions, the nearest first. draws: how many are compared by load; 0 compares all.
    """

    key: str
    fingerprint: str
    holders: tuple[str, ...] = ()
    near: tuple[str, ...] = ()
    draws: int = 0


class Reason(StrEnum):
    """Why a candidate was chosen; each a value of a metric's label."""

    HOLDER = "holds the cache"
    ONLY = "the only one"
    NEAR = "nearer"
    LOAD = "less load"


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    reason: Reason


def place(candidates: Iterable[Candidate], wish: Wish) -> Choice | None:
    """Who gets the session; None if nobody can have it. Among equals the first one does."""
    fit = [each for each in candidates if _fits(each, wish)]
    by_name = {each.name: each for each in fit}
    for name in wish.holders:
        if name in by_name and by_name[name].has_room:
            return Choice(name, Reason.HOLDER)
    if not fit:
        return None
    classes = [_class(each, wish) for each in fit]
    best = min(classes)
    alike = [each for each, of in zip(fit, classes, strict=True) if of == best]
    chosen = min(_drawn(alike, wish), key=lambda each: each.load)
    if len(fit) == 1:
        return Choice(chosen.name, Reason.ONLY)
    farther = any(of[:-1] == best[:-1] and of != best for of in classes)
    return Choice(chosen.name, Reason.NEAR if len(alike) == 1 and farther else Reason.LOAD)


def _fits(candidate: Candidate, wish: Wish) -> bool:
    return candidate.up and not candidate.draining and candidate.fingerprint == wish.fingerprint


def _class(candidate: Candidate, wish: Wish) -> tuple[int, bool, bool, int]:
    """The smallest is served first."""
    distance = wish.near.index(candidate.region) if candidate.region in wish.near else len(wish.near)
    return candidate.refusals, not candidate.fresh, not candidate.has_room, distance


def _drawn(alike: Sequence[Candidate], wish: Wish) -> Sequence[Candidate]:
    """Those that are compared by load, in the order in which they were given."""
    if not 0 < wish.draws < len(alike):
        return alike
    lots = {each.name: _lot(wish.key, each.name) for each in alike}
    taken = set(sorted(lots, key=lots.__getitem__)[: wish.draws])
    return [each for each in alike if each.name in taken]


def _lot(key: str, name: str) -> bytes:
    """Random in key and name, and the same wherever it is drawn."""
    return hashlib.blake2b(f"{len(key)}:{key}{name}".encode(), digest_size=8).digest()
