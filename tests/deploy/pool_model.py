"""A pool of verifiers in virtual time: sessions arrive and take a given time, and an autoscaler steers.

A session goes to the replica with the fewest sessions that has room, as an orchestrator places it; waiting ones go
wherever a slot comes free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deploy.cluster.rollout import ReplicaName, ReplicaPlace
from deploy.cluster.scaling import PoolSample, ScalingController, every
from deploy.cluster.schema import ClusterConfig, Group
from specwire.registry.entry import Load, Role, ServiceEntry, ServiceState

TICK_S = 0.05
# As `verify_service.engine.sessions` remembers waits.
KEPT_S = 5.0
# An entry is at most as old.
BEAT_S = 2.0


@dataclass(slots=True)
class Member:
    """A replica. ready_at: seconds; ends: when the sessions that have a slot end; queue: when those that wait came."""

    number: int
    ready_at: float
    ends: list[float] = field(default_factory=list)
    queue: list[tuple[float, float]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    draining: bool = False
    entry: ServiceEntry | None = None


class PoolModel:
    """One pool of `config`, the first; `slots` of each replica, which takes `start_s` to be ready.

    `waits`: when each session came, and how long it waited for its slot. `looks`: what the autoscaler saw. `counts`:
    replicas that stay, by time.
    """

    def __init__(self, config: ClusterConfig, slots: int, start_s: float) -> None:
        self.waits: list[tuple[float, float]] = []
        self.looks: list[PoolSample] = []
        self.counts: list[tuple[float, int]] = []
        self._group: Group = config.groups[0]
        self._slots, self._start_s = slots, start_s
        self._controller = ScalingController(config, 600.0, 30.0)
        self._every_s = every(config)
        self._members: dict[ReplicaName, Member] = {}
        self._now = 0.0
        for number in range(self._group.least):
            self._members[ReplicaName(self._group.name, self._group.digest, number)] = Member(number, 0.0)

    def play(self, arrivals: Sequence[tuple[float, float]], until: float) -> None:
        """arrivals: when each session comes and for how long it is served, by rising time."""
        left = list(reversed(arrivals))
        next_look = next_beat = 0.0
        while self._now < until:
            while left and left[-1][0] <= self._now:
                came, seconds = left.pop()
                self._place(came, seconds)
            self._pass()
            if self._now >= next_beat:
                self._beat()
                next_beat += BEAT_S
            if self._now >= next_look:
                self._look()
                next_look += self._every_s
            self._now += TICK_S

    def _serving(self) -> list[Member]:
        return [each for each in self._members.values() if each.ready_at <= self._now and not each.draining]

    def _place(self, came: float, seconds: float) -> None:
        member = min(self._serving(), key=lambda each: len(each.ends) + len(each.queue))
        member.queue.append((came, seconds))

    def _pass(self) -> None:
        for member in self._members.values():
            member.ends = [end for end in member.ends if end > self._now]
        waiting = sorted(
            (came, seconds, member.number) for member in self._members.values() for came, seconds in member.queue
        )
        by_number = {member.number: member for member in self._members.values()}
        for came, seconds, number in waiting:
            self._seat(by_number[number], came, seconds)
        for name in [name for name, each in self._members.items() if each.draining and not (each.ends or each.queue)]:
            del self._members[name]

    def _seat(self, at: Member, came: float, seconds: float) -> None:
        free = [each for each in self._serving() if len(each.ends) < self._slots]
        if not free:
            return
        member = at if at in free else min(free, key=lambda each: len(each.ends))
        at.queue.remove((came, seconds))
        member.ends.append(self._now + seconds)
        member.waits.append((self._now, self._now - came))
        self.waits.append((came, self._now - came))

    def _beat(self) -> None:
        for member in self._serving():
            recent = [waited for at, waited in member.waits if self._now - at < KEPT_S]
            longest = max([*recent, *(self._now - came for came, _ in member.queue)], default=0.0)
            load = Load(len(member.ends), len(member.queue), self._slots - len(member.ends), longest)
            member.entry = ServiceEntry(
                f"{member.number:032x}", Role.VERIFIER, _address(member), slots=self._slots, load=load
            )

    def _look(self) -> None:
        places = {
            name: ReplicaPlace(_address(each) if each.ready_at <= self._now else "", "node", draining=each.draining)
            for name, each in self._members.items()
        }
        entries = [
            each.entry
            for each in self._serving()
            if each.entry is not None and each.entry.state is ServiceState.SERVING
        ]
        orders = self._controller.look(places, entries, self._now)
        for name in orders.start:
            self._members[name] = Member(name.number, self._now + self._start_s)
        for name in orders.drain:
            self._members[name].draining = True
        for name in orders.kill:
            del self._members[name]
        self.looks += orders.looks
        self.counts.append((self._now, sum(not each.draining for each in self._members.values())))


def _address(member: Member) -> str:
    return f"a:{member.number + 1}"
