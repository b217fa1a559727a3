"""While a command changes a deployment, its autoscaler does not; afterwards another one does."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from deploy.cluster.commands import DRAIN_MARGIN_S
from deploy.cluster.fleet import AUTOSCALERS, Fleet, kept, listed
from deploy.cluster.rollout import ReplicaName, ReplicaPlace
from deploy.cluster.scaling import PoolLoad, ScalingState, decide
from deploy.cluster.schema import ClusterConfig, Group, parse
from specwire.registry.directory import RegistryUnavailable
from specwire.registry.entry import Load, Role, ServiceEntry, ServiceState

# ----------------------------------------------------------------------------------------------------------------------
# The Ray actor that keeps a deployment's pools as large as their load asks: named, detached, one for a deployment.
#
# `specwire deploy` starts it where a pool may have more than one number of replicas. It keeps no state that matters: a
# restarted one, by Ray or by the next command, goes on from what it finds.

logger = logging.getLogger(__name__)

# Looks that can be asked for: an hour's of one pool.
KEPT_LOOKS = 720


class Autoscaler:
    """See Fleet and ScalingController. text: the file that was deployed."""

    def __init__(self, text: str, start_timeout: float) -> None:
        self._config = parse(text)
        self._fleet = Fleet(_say, start_timeout, DRAIN_MARGIN_S)
        self._controller = ScalingController(self._config, start_timeout, DRAIN_MARGIN_S)
        self._every_s = every(self._config)
        self._looking = threading.Lock()
        self._looks: deque[PoolSample] = deque(maxlen=KEPT_LOOKS)
        # A daemon: it holds nothing that has to be put back, and its process ends when the actor is killed.
        threading.Thread(target=self._run, name="autoscaler", daemon=True).start()

    def looks(self) -> list[dict[str, Any]]:
        """What was seen lately, the oldest first; times are Unix times."""
        shift = time.time() - time.monotonic()
        return [asdict(look) | {"at": look.at + shift} for look in list(self._looks)]

    def hold(self) -> None:
        """Stop: a command is about to change the deployment."""
        self._looking.acquire()

    def _run(self) -> None:
        while True:
            time.sleep(self._every_s)
            try:
                with self._looking:
                    self._look()
            except (
                RegistryUnavailable,
                RayError,
                ValueError,
            ) as error:  # also errors of Ray, such as a name that is still taken
                _say(f"not this time: {error}")
            except Exception:  # a bug of ours: the next look may work
                logger.exception("a look at the deployment failed")

    def _look(self) -> None:
        places = self._fleet.places()
        entries = asyncio.run(listed(self._config.registry))
        orders = self._controller.look(places, entries, time.monotonic())
        self._looks += orders.looks
        carry_out(self._fleet, self._config, orders)
        for note in orders.notes:
            _say(note)


def carry_out(fleet: Fleet, config: ClusterConfig, orders: ScalingActions) -> None:
    """Start changes without waiting: the next look tells how they went."""
    for name in orders.kill:
        fleet.kill(name)
    for name in orders.start:
        group = config.group(name.group)
        if group is not None:
            fleet.begin(group, name)
    for name in orders.drain:
        fleet.retire(name)


def _say(line: str) -> None:
    """Into the actor's log, which is Ray's."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


BEGIN_LIMIT_S = 30.0


@contextmanager
def changing(fleet: Fleet, start_timeout: float) -> Iterator[None]:
    """Be the only autoscaler. The next one goes by the file that is kept then, also after a failure."""
    fleet.take_over()
    try:
        yield
    finally:
        text = kept(start_timeout)
        if text is not None:
            autoscale(text, start_timeout)


def autoscale(text: str, start_timeout: float) -> None:
    """Start the autoscaler for this file's pools, if any of them scales."""
    scaled = [group for group in parse(text).groups if group.scales]
    if scaled:
        actor = AUTOSCALERS.begin(Autoscaler, text, start_timeout, runtime_env=scaled[0].runtime_env)
        ray.wait([actor.looks.remote()], timeout=BEGIN_LIMIT_S)  # it outlives this process once it is there


# ----------------------------------------------------------------------------------------------------------------------
# The actor's work: each pool's load by the registry, and the decision of `scaling`. No Ray in here.

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
        orders.start += _new(group, mine, max(0, wanted - len(staying)))
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
    running = sum(load.running for load in told)
    return PoolLoad(
        replicas,
        running,
        sum(load.waiting for load in told) + (0 if told or group.words[0] != "verify" else _homeless(entries)),
        sum(entry.slots for entry in loads.values()),
        max((load.queue_s for load in told), default=0.0),
        _misses(told, running),
        len(told),
    )


def _homeless(entries: Iterable[ServiceEntry]) -> int:
    """Sessions without a verifier; their models are unknown."""
    return sum(entry.load.waiting for entry in entries if entry.role is Role.ORCHESTRATOR)


def _misses(loads: Iterable[Load], running: int) -> float:
    return sum(load.misses * load.running for load in loads) / max(1, running)


def _new(group: Group, mine: Iterable[ReplicaName], count: int) -> list[ReplicaName]:
    """`count` names that no replica has."""
    taken = {name.number for name in mine}
    free = (number for number in range(len(taken) + count) if number not in taken)
    return [ReplicaName(group.name, group.digest, next(free)) for _ in range(count)]


def _spare(staying: Places, loads: Mapping[ReplicaName, ServiceEntry]) -> list[ReplicaName]:
    """Ordered by what can be spared: replicas that serve nobody yet, then with the fewest sessions, then the newest."""

    def key(name: ReplicaName) -> tuple[int, int]:
        entry = loads.get(name)
        return -1 if entry is None else entry.load.running + entry.load.waiting, -name.number

    return sorted(staying, key=key)


def _told(reading: PoolLoad) -> str:
    sessions = f"{reading.running} of {reading.slots} slots, {reading.waiting} waiting"
    return f"{sessions}, the longest {reading.queue_s:g} s, misses {reading.misses:.2f}"


def every(config: ClusterConfig) -> float:
    """Seconds between two looks: a pool is looked at twice at least before it may grow."""
    shortest = min((group.rule.grow_after_s for group in config.groups if group.scales), default=MOST_EVERY_S)
    return min(MOST_EVERY_S, max(LEAST_EVERY_S, shortest / 2))
