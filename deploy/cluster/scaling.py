"""How many replicas a pool should have, as a pure function of its load, with hysteresis. No Ray in here.

It grows at once where for a while sessions wait, or replicas are nearly full. It shrinks, one at a time, where for much
longer the remaining replicas would be far from that. Between the two nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from deploy.cluster.rollout import ReplicaName, ReplicaPlace, new_names
from deploy.cluster.schema import ClusterConfig, Group, ScalingRule
from specwire.registry.entry import Role, ServiceEntry, ServiceState


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """A pool's load: sessions that have a slot, that wait for one, and slots, of all replicas together.

    ready: of its `replicas`, those that have told their load; None for all. waiting: also those that no verifier has.
    queue_s: the longest that a session waits, or has waited of late.
    """

    replicas: int
    running: int
    waiting: int
    slots: int
    queue_s: float = 0.0
    ready: int | None = None

    @property
    def known(self) -> int:
        """Replicas whose load this is."""
        return self.replicas if self.ready is None else self.ready


@dataclass(frozen=True, slots=True)
class ScalingState:
    """Since when it is too full, and since when too empty; None while it is not."""

    full_since: float | None = None
    empty_since: float | None = None


def decide(rule: ScalingRule, memory: ScalingState, reading: PoolLoad, now: float) -> tuple[int, ScalingState]:
    """The replicas that there should be now, and what to remember. now: seconds on any clock that does not go back.

    A pool grows only once all that it has are ready and have been seen at work: what is being started is not asked for
    twice.
    """
    count = reading.replicas
    if not rule.least <= count <= rule.most:
        return min(max(count, rule.least), rule.most), ScalingState()
    if count == 0:
        return min(1, reading.waiting), ScalingState()
    if reading.slots == 0:  # no replica has told its slots yet
        return count, memory
    memory = ScalingState(
        _since(memory.full_since, reading.known == count and _is_full(rule, reading, count), now),
        _since(memory.empty_since, count > rule.least and _would_do(rule, reading, count - 1), now),
    )
    if _lasts(memory.full_since, rule.grow_after_s, now) and count < rule.most:
        needed = math.ceil((reading.running + reading.waiting) * count / (rule.high * reading.slots))
        return min(max(count + 1, needed), rule.most), ScalingState()
    if _lasts(memory.empty_since, rule.shrink_after_s, now):
        return count - 1, replace(memory, empty_since=now)
    return count, memory


def _is_full(rule: ScalingRule, reading: PoolLoad, count: int) -> bool:
    """Whether `count` replicas are too full."""
    demand = reading.running + reading.waiting
    return demand > rule.high * _slots(reading, count) or reading.queue_s > rule.queue_s


def _would_do(rule: ScalingRule, reading: PoolLoad, count: int) -> bool:
    """Whether `count` replicas would do, far from full."""
    idle = reading.waiting == 0 and reading.queue_s <= rule.queue_s
    return idle and reading.running <= rule.low * _slots(reading, count)


def _slots(reading: PoolLoad, count: int) -> float:
    return reading.slots * count / max(1, reading.known)


def _since(began: float | None, holds: bool, now: float) -> float | None:
    return (now if began is None else began) if holds else None


def _lasts(began: float | None, seconds: float, now: float) -> bool:
    return began is not None and now - began >= seconds


# ----------------------------------------------------------------------------------------------------------------------
# The autoscaler's work: each pool's load by the registry, and what to start, drain and kill.

# Seconds for which a pool does not grow after a replica could not start.
RETRY_S = 60.0
# Seconds between two looks.
MOST_EVERY_S, LEAST_EVERY_S = 5.0, 0.5

Places = Mapping[ReplicaName, ReplicaPlace | None]


@dataclass(frozen=True, slots=True)
class PoolSample:
    """What was seen of a pool at a time, in seconds, and how many replicas it should have had then."""

    at: float
    pool: str
    reading: PoolLoad
    wanted: int


@dataclass(slots=True)
class ScalingActions:
    """start, drain: replicas. kill: those that should have ended, or started, long ago. notes: for people.

    looks: of all pools that were looked at.
    """

    start: list[ReplicaName] = field(default_factory=list)
    drain: list[ReplicaName] = field(default_factory=list)
    kill: list[ReplicaName] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    looks: list[PoolSample] = field(default_factory=list)


class ScalingController:
    """Keeps the replicas of each pool that scales as many as its load asks for.

    Args:
        start_timeout: seconds in which a replica is ready, or goes again. Ray may wait for a node in that time.
        drain_margin: seconds beyond its grace after which a replica that drains is killed.
    """

    def __init__(self, config: ClusterConfig, start_timeout: float, drain_margin: float) -> None:
        self._groups = [group for group in config.groups if group.scales]
        self._start_timeout = start_timeout
        self._drain_margin = drain_margin
        self._memories = {group.name: ScalingState() for group in self._groups}
        self._starting: dict[ReplicaName, float] = {}
        self._leaving: dict[ReplicaName, float] = {}
        self._failed_at: dict[str, float] = {}

    def look(self, places: Places, entries: Sequence[ServiceEntry], now: float) -> ScalingActions:
        """What to do. places: of all replicas there are; None of one that does not answer."""
        orders = ScalingActions()
        self._note(places, now)
        for group in self._groups:
            mine = {name: place for name, place in places.items() if name.group == group.name}
            if all(name.digest == group.digest for name in mine):  # else an update is under way, or was broken off
                self._steer(group, mine, entries, now, orders)
        return orders

    def _note(self, places: Places, now: float) -> None:
        """Note which replicas have begun to start or to leave, and which have done so."""
        leaving = [name for name, place in places.items() if place is not None and place.draining]
        starting = [name for name, place in places.items() if place is None or not (place.address or place.draining)]
        self._leaving = {
            name: self._leaving.get(name, now) for name in places if name in self._leaving or name in leaving
        }
        self._starting = {name: self._starting.get(name, now) for name in starting if name not in self._leaving}

    def _steer(
        self, group: Group, mine: Places, entries: Sequence[ServiceEntry], now: float, orders: ScalingActions
    ) -> None:
        self._clear(group, mine, now, orders)
        gone = set(orders.kill) | set(self._leaving)
        staying = {name: place for name, place in mine.items() if name not in gone}
        loads = _loads(staying, entries)
        reading = _reading(group, len(staying), loads, entries)
        wanted, self._memories[group.name] = decide(group.rule, self._memories[group.name], reading, now)
        if self._is_barred(group, now):
            wanted = min(wanted, len(staying))
        orders.looks.append(PoolSample(now, group.name, reading, wanted))
        orders.start += new_names(group, mine, max(0, wanted - len(staying)))
        for name in _spare(staying, loads)[: max(0, len(staying) - wanted)]:
            self._leaving[name] = now
            orders.drain.append(name)
        if wanted != len(staying):
            orders.notes.append(f"{group.name}: {len(staying)} -> {wanted} ({_told(reading)})")

    def _clear(self, group: Group, mine: Places, now: float, orders: ScalingActions) -> None:
        """Kill replicas that have used up their time to start, or to end."""
        for name, place in mine.items():
            failure = self._failure(name, place, now)
            if failure:
                self._failed_at[group.name] = now
                orders.notes.append(f"{name}: {failure}")
            if failure or now - self._leaving.get(name, now) > group.grace + self._drain_margin:
                orders.kill.append(name)

    def _failure(self, name: ReplicaName, place: ReplicaPlace | None, now: float) -> str:
        """Why it has not come to be ready, or is not any more."""
        if place is not None and place.error and not place.draining:
            return place.error
        late = now - self._starting.get(name, now) > self._start_timeout
        return f"not ready within {self._start_timeout:g} s" if late else ""

    def _is_barred(self, group: Group, now: float) -> bool:
        return now - self._failed_at.get(group.name, now - RETRY_S) < RETRY_S


def _loads(places: Places, entries: Iterable[ServiceEntry]) -> dict[ReplicaName, ServiceEntry]:
    """The entries of those that serve."""
    found = {entry.address: entry for entry in entries if entry.state is ServiceState.SERVING}
    return {
        name: found[place.known_as] for name, place in places.items() if place is not None and place.known_as in found
    }


def _reading(
    group: Group, replicas: int, loads: Mapping[ReplicaName, ServiceEntry], entries: Iterable[ServiceEntry]
) -> PoolLoad:
    told = [entry.load for entry in loads.values()]
    return PoolLoad(
        replicas,
        sum(load.running for load in told),
        sum(load.waiting for load in told) + (0 if told or group.words[0] != "verify" else _homeless(entries)),
        sum(entry.slots for entry in loads.values()),
        max((load.queue_s for load in told), default=0.0),
        len(told),
    )


def _homeless(entries: Iterable[ServiceEntry]) -> int:
    """Sessions without a verifier; their models are unknown."""
    return sum(entry.load.waiting for entry in entries if entry.role is Role.ORCHESTRATOR)


def _spare(staying: Places, loads: Mapping[ReplicaName, ServiceEntry]) -> list[ReplicaName]:
    """Ordered by what can be spared: replicas that serve nobody yet, then with the fewest sessions, then the newest."""

    def key(name: ReplicaName) -> tuple[int, int]:
        entry = loads.get(name)
        return -1 if entry is None else entry.load.running + entry.load.waiting, -name.number

    return sorted(staying, key=key)


def _told(reading: PoolLoad) -> str:
    sessions = f"{reading.running} of {reading.slots} slots, {reading.waiting} waiting"
    return f"{sessions}, the longest {reading.queue_s:g} s"


def every(config: ClusterConfig) -> float:
    """Seconds between two looks: a pool is looked at twice at least before it may grow."""
    shortest = min((group.rule.grow_after_s for group in config.groups if group.scales), default=MOST_EVERY_S)
    return min(MOST_EVERY_S, max(LEAST_EVERY_S, shortest / 2))
