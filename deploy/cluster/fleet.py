"""The replicas of one deployment on a Ray cluster: named, detached actors in a namespace of its own."""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from deploy.cluster.planning import Change, ReplicaName, replica_name
from deploy.cluster.replica import Order, Place, Record, Replica
from deploy.cluster.schema import ClusterConfig, Group
from deploy.options import StackError
from specwire.rpc.process import one_line

RECORD = re.compile(r"config:(\d+)")
ASK_LIMIT_S = 5.0
KNOCK_LIMIT_S = 5.0
# Calls to a replica while another one waits for its start, or its end.
CALLS = 4


class Fleet:
    """Owned by one process at a time; what it starts outlives it. StackError says in one sentence what went wrong."""

    def __init__(self, report: Callable[[str], None], start_timeout: float, drain_timeout: float) -> None:
        self._report = report
        self._start_timeout = start_timeout
        self._drain_timeout = drain_timeout

    def seen(self) -> list[ReplicaName]:
        """The replicas that Ray keeps up, in whatever state."""
        return sorted(name for text in ray.util.list_named_actors() if (name := replica_name(text)) is not None)

    def apply(self, config: ClusterConfig | None, changes: Iterable[Change]) -> None:
        """Make the changes in turn; one that fails leaves what it would have replaced as it is."""
        for change in changes:
            self._report(str(change))
            group = config.group(change.group) if config is not None else None
            if group is not None and change.drain_first:
                self._one_by_one(group, change)
            else:
                self._start(group, change.start)
                self._drain(change.drain)

    def _one_by_one(self, group: Group, change: Change) -> None:
        left = list(change.drain)
        for name in change.start:
            self._drain(left[:1])
            del left[:1]
            self._start(group, [name])
        self._drain(left)

    def _start(self, group: Group | None, names: Sequence[ReplicaName]) -> None:
        if group is None:
            return
        actors = {name: _begin(group, name) for name in names}
        try:
            self._settle(group, actors)
        except BaseException:
            for actor in actors.values():
                ray.kill(actor)
            raise

    def _settle(self, group: Group, actors: dict[ReplicaName, Any]) -> None:
        names = {actor.outcome.remote(): name for name, actor in actors.items()}
        deadline = time.monotonic() + self._start_timeout
        while names:
            done, _ = ray.wait(list(names), timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                raise StackError(f"{group.name}: not ready within {self._start_timeout:g} s; {_asked_for(group)}")
            name = names.pop(done[0])
            try:
                outcome = ray.get(done[0])
            except RayActorError as error:
                raise StackError(f"{name}: its process died while starting: {one_line(error)}") from None
            if outcome.error:
                raise StackError(f"{name}: {outcome.error}")
            self._report(f"{name}: ready on {outcome.address}")

    def _drain(self, names: Sequence[ReplicaName]) -> None:
        """All at once. One that cannot be reached is being started again by Ray, or waits for a node: it just goes."""
        actors = {name: ray.get_actor(str(name)) for name in names if _is_there(name)}
        drained = [actor.drain.remote() for actor in actors.values()]
        if drained:
            with suppress(GetTimeoutError, RayError):
                ray.get(drained, timeout=self._drain_timeout)
        for name, actor in actors.items():
            ray.kill(actor)
            self._report(f"{name}: gone")

    def places(self) -> dict[ReplicaName, Place | None]:
        """Where each replica is; None of one that does not answer now."""
        there = [name for name in self.seen() if _is_there(name)]
        asked: dict[ReplicaName, Any] = {name: ray.get_actor(str(name)).place.remote() for name in there}
        if not asked:
            return {}
        answered, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=ASK_LIMIT_S)
        return {name: _answer(reference) if reference in answered else None for name, reference in asked.items()}

    def keep(self, text: str) -> None:
        """Remember the file that is applied. The older record goes once the newer one is there."""
        older = self._records()
        number = max(older, default=0) + 1
        record: Any = (
            ray.remote(Record)
            .options(name=f"config:{number}", lifetime="detached", max_restarts=-1, num_cpus=0)
            .remote(text)
        )
        ray.get(record.text.remote(), timeout=self._start_timeout)
        self._forget(older)

    def kept(self) -> str | None:
        """The file that was applied last."""
        numbers = self._records()
        if not numbers:
            return None
        return str(ray.get(ray.get_actor(f"config:{max(numbers)}").text.remote(), timeout=self._start_timeout))

    def forget(self) -> None:
        self._forget(self._records())

    def _records(self) -> list[int]:
        return [int(found[1]) for text in ray.util.list_named_actors() if (found := RECORD.fullmatch(text))]

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            with suppress(ValueError):  # gone meanwhile
                ray.kill(ray.get_actor(f"config:{number}"))


@contextmanager
def connected(address: str, namespace: str) -> Iterator[None]:
    """A connection to the cluster at `address`. Raises StackError."""
    _knock(address)
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise StackError(f"no Ray cluster at {address}: {one_line(error)}") from None
    try:
        yield
    except RayError as error:
        raise StackError(f"Ray: {one_line(error)}") from None
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Ray itself takes minutes to say that nobody is there. Raises StackError."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isascii() and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), KNOCK_LIMIT_S).close()
        except (OSError, OverflowError) as error:
            raise StackError(f"no Ray cluster at {address}: {one_line(error)}") from None


def _begin(group: Group, name: ReplicaName) -> Any:
    order = Order(group.words, group.port, group.http_port, dict(group.environment))
    options: dict[str, Any] = {
        "name": str(name),
        "lifetime": "detached",
        "max_restarts": -1,
        "max_concurrency": CALLS,
        "num_cpus": group.num_cpus,
        "num_gpus": group.num_gpus,
        "resources": dict(group.resources),
        "scheduling_strategy": "SPREAD",
    }
    if group.accelerator_type:
        options["accelerator_type"] = group.accelerator_type
    if group.runtime_env:
        options["runtime_env"] = dict(group.runtime_env)
    return ray.remote(Replica).options(**options).remote(order)


def _is_there(name: ReplicaName) -> bool:
    try:
        ray.get_actor(str(name))
    except ValueError:
        return False
    return True


def _answer(reference: Any) -> Place | None:
    try:
        place: Place = ray.get(reference)
    except RayError:
        return None
    return place


def _asked_for(group: Group) -> str:
    wanted = {"CPU": group.num_cpus, "GPU": group.num_gpus, group.accelerator_type: 1, **group.resources}
    told = ", ".join(f"{name}: {amount:g}" for name, amount in wanted.items() if name and amount)
    return f"each replica asks for a node with {told or 'nothing'} free"
