"""The way from the actual to the wanted state, as a pure function.

A replica's name says everything about it: its group, the digest of its definition, its number. So Ray's list of named
actors is the whole state, and a deployment that was broken off goes on from there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deploy.cluster.schema import ClusterConfig, Group

FORM = re.compile(r"replica:(?P<group>[a-z0-9-]+):(?P<digest>[0-9a-f]+):(?P<number>\d+)")

CREATED, REPLACED, SCALED, UNCHANGED, REMOVED = "created", "replaced", "scaled", "unchanged", "removed"


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """Where a replica is, as it says itself.

    address: "" until it is ready. http: the URL of an orchestrator that has one. error: why it cannot start.

    draining: it was told to end. registered: its address in the registry, where it advertises another one.
    """

    address: str
    node: str
    http: str = ""
    error: str = ""
    draining: bool = False
    registered: str = ""

    @property
    def known_as(self) -> str:
        """Its address in the registry; "" until it is ready."""
        return self.registered or self.address


@dataclass(frozen=True, slots=True, order=True)
class ReplicaName:
    """A replica of the group that was made by what has this digest."""

    group: str
    digest: str
    number: int

    def __str__(self) -> str:
        return f"replica:{self.group}:{self.digest}:{self.number}"


def replica_name(text: str) -> ReplicaName | None:
    """The replica of that name; None of another actor's."""
    found = FORM.fullmatch(text)
    return ReplicaName(found["group"], found["digest"], int(found["number"])) if found else None


def new_names(group: Group, there: Iterable[ReplicaName], count: int) -> list[ReplicaName]:
    """`count` names that no replica has."""
    taken = {name.number for name in there}
    free = (number for number in range(len(taken) + count) if number not in taken)
    return [ReplicaName(group.name, group.digest, next(free)) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Change:
    """What a group needs.

    start: replicas to start; all are ready before any of `drain` is told to end, unless `drain_first`: these hold what
    their successors need, such as a port, and are replaced one by one.
    before, after: replicas.
    """

    group: str
    what: str
    start: tuple[ReplicaName, ...] = ()
    drain: tuple[ReplicaName, ...] = ()
    drain_first: bool = False
    before: int = 0
    after: int = 0

    def __str__(self) -> str:
        return f"{self.group}: {self.what} ({self.before} -> {self.after})"


def plan(config: ClusterConfig, seen: Iterable[ReplicaName], counts: Mapping[str, int] | None = None) -> list[Change]:
    """Each group's change, in the order in which they are to be made.

    Args:
        counts: replicas by group, for those that shall have another number than now; it is kept within its bounds.
    """
    there = sorted(set(seen))
    known = {group.name for group in config.groups}
    changes = [_change(group, [each for each in there if each.group == group.name], counts) for group in config.groups]
    return changes + [
        _removal(name, [each for each in there if each.group == name])
        for name in sorted({each.group for each in there} - known)
    ]


def removal(seen: Iterable[ReplicaName]) -> list[Change]:
    """Removal of all replicas; orchestrators, which call the others, first."""
    there = sorted(set(seen))
    names = sorted({each.group for each in there}, key=lambda name: (name != "orchestrators", name))
    return [_removal(name, [each for each in there if each.group == name]) for name in names]


def _removal(name: str, there: list[ReplicaName]) -> Change:
    return Change(name, REMOVED, drain=tuple(there), before=len(there))


def _change(group: Group, there: list[ReplicaName], counts: Mapping[str, int] | None) -> Change:
    current = [each for each in there if each.digest == group.digest]
    old = [each for each in there if each.digest != group.digest]
    wanted = group.clamped((counts or {}).get(group.name, max(len(current), len(old))))
    kept, surplus = current[:wanted], current[wanted:]
    start = tuple(new_names(group, kept, wanted - len(kept)))
    drain = (*old, *surplus)
    what = REPLACED if old else SCALED if current else CREATED
    if not (start or drain):
        what = UNCHANGED
    fixed = group.port > 0 or group.http_port > 0
    return Change(group.name, what, start, drain, bool(old) and fixed, len(there), wanted)
