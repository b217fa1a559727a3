"""The replicas of one deployment on a Ray cluster: named, detached actors in a namespace of its own.

Among them is its autoscaler. While a command changes the deployment that one does not; afterwards another one does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.cluster.replica import Record, Replica, ReplicaSpec, say_in_log
from deploy.cluster.rollout import Change, ReplicaName, ReplicaPlace, replica_name
from deploy.cluster.scaling import PoolSample, ScalingActions, ScalingController, every
from deploy.cluster.schema import DRAIN_MARGIN_S, ClusterConfig, Group, parse, ray_token
from deploy.stack.options import StackError
from specwire.registry.directory import Directory, RegistryUnavailable
from specwire.registry.entry import Role, ServiceEntry, ServiceState
from specwire.rpc.process import one_line

logger = logging.getLogger(__name__)

# ----------------------------------------------------------------------------------------------------------------------
# Actors that a deployment has one of. A newer one has a higher number, and counts while both are there.


class NumberedActors:
    """The actors KIND:NUMBER of the namespace: named, detached, restarted by Ray, nothing to the scheduler."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def numbers(self) -> list[int]:
        form = re.compile(rf"{self._kind}:(\d+)")
        return [int(found[1]) for text in ray.util.list_named_actors() if (found := form.fullmatch(text))]

    def newest(self) -> Any | None:
        numbers = self.numbers()
        return _actor(f"{self._kind}:{max(numbers)}") if numbers else None

    def begin(self, what: type, *arguments: object, runtime_env: Mapping[str, Any] | None = None) -> Any:
        """A newer one, made by `what` with these arguments."""
        options: dict[str, Any] = {
            "name": f"{self._kind}:{max(self.numbers(), default=0) + 1}",
            "lifetime": "detached",
            "max_restarts": -1,
            "num_cpus": 0,
        }
        if runtime_env:
            options["runtime_env"] = dict(runtime_env)
        return ray.remote(what).options(**options).remote(*arguments)

    def end(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if (actor := _actor(f"{self._kind}:{number}")) is not None:
                ray.kill(actor)


# The actors beside the replicas: what keeps the file that was applied last, and what scales pools by their load.
RECORDS = NumberedActors("config")
AUTOSCALERS = NumberedActors("autoscaler")
ASK_LIMIT_S = 5.0
# Seconds without an answer after which an actor cannot be told to drain.
REACH_LIMIT_S = 20.0
KNOCK_LIMIT_S = 5.0
# A method of Ray's control plane, called only to see whether it lets us in.
ANY_METHOD = "/ray.rpc.NodeInfoGcsService/CheckAlive"
# Seconds for an autoscaler to finish its present change.
HOLD_LIMIT_S = 30.0
# Calls to a replica while another one waits for its start, or its end.
CALLS = 4


class Fleet:
    """Owned by one process at a time; what it starts outlives it. StackError says in one sentence what went wrong.

    start_timeout: seconds within which a replica is ready. drain_timeout: seconds within which a draining one has
    ended.
    """

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
                if config is not None and group is not None and group.words[0] == "verify" and change.drain:
                    self._make_known(config.registry, change.start)
                self._drain(change.drain)

    def _one_by_one(self, group: Group, change: Change) -> None:
        left = list(change.drain)
        for name in change.start:
            self._drain(left[:1])
            del left[:1]
            self._start(group, [name])
        self._drain(left)

    def _make_known(self, registry: str, names: Sequence[ReplicaName]) -> None:
        """Wait until orchestrators use the new replicas: none may begin a session on weights that will go."""
        addresses = [place.known_as for place in self.places(names).values() if place is not None]
        if addresses and not wait_until_known(registry, addresses):
            self._report("not every orchestrator says that it uses the new replicas; going on")

    def _start(self, group: Group | None, names: Sequence[ReplicaName]) -> None:
        """Start replicas and return when all are ready."""
        if group is None:
            return
        actors: dict[ReplicaName, Any] = {}
        try:
            for name in names:
                actors[name] = self.begin(group, name)
            self._settle(group, actors)
        except BaseException:
            for name in actors:
                self.kill(name)
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
        """Drain replicas, all at once. One that cannot be reached is being restarted, or waits for a node: it goes."""
        places = self.places(names, REACH_LIMIT_S)
        there = [name for name, place in places.items() if place is not None]
        drained: list[Any] = [actor.drain.remote() for name in there if (actor := _actor(str(name))) is not None]
        if drained:
            ray.wait(drained, num_returns=len(drained), timeout=self._drain_timeout)
        for name in places:
            self.kill(name)
            self._report(f"{name}: gone")

    def begin(self, group: Group, name: ReplicaName) -> Any:
        """Have it started; returns its actor, which may have to wait for a node."""
        order = ReplicaSpec(group.words, group.port, group.http_port, dict(group.environment), group.python)
        options = _options(group, name)
        if group.ranks < 2 or not (bundle := _bundle(group)):
            return ray.remote(Replica).options(**options).remote(order)
        made = ray.util.placement_group([bundle], "STRICT_PACK", name=str(name), lifetime="detached")
        try:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(made, placement_group_bundle_index=0)
            return ray.remote(Replica).options(**options).remote(order)
        except BaseException:  # nobody would know of it, and it holds its devices
            ray.util.remove_placement_group(made)
            raise

    def retire(self, name: ReplicaName) -> None:
        """Tell it to drain, and to go then."""
        if (actor := _actor(str(name))) is not None:
            actor.drain.remote()

    def kill(self, name: ReplicaName) -> None:
        """End it, and give back what was set aside for it."""
        if (actor := _actor(str(name))) is not None:
            ray.kill(actor)
        _give_back(str(name))

    def take_over(self) -> None:
        """End the autoscaler, and wait for those that it, or a command that was broken off, has told to go."""
        autoscaler = AUTOSCALERS.newest()
        if autoscaler is not None:
            with suppress(GetTimeoutError, RayError):
                ray.get(autoscaler.hold.remote(), timeout=HOLD_LIMIT_S)
        AUTOSCALERS.end(AUTOSCALERS.numbers())
        self._give_back_forgotten()
        self._drain([name for name, place in self.places().items() if place is not None and place.draining])

    def _give_back_forgotten(self) -> None:
        """What was set aside for replicas that are gone, or never came, as their command was broken off."""
        living = {str(name) for name in self.seen()}
        for found in ray.util.placement_group_table().values():
            name = str(found["name"])
            if found["state"] != "REMOVED" and replica_name(name) is not None and name not in living:
                _give_back(name)

    def places(
        self, names: Iterable[ReplicaName] | None = None, limit_s: float = ASK_LIMIT_S
    ) -> dict[ReplicaName, ReplicaPlace | None]:
        """Where each replica is, of all or of those named that are there; None of one that does not answer in time."""
        actors = {name: _actor(str(name)) for name in (self.seen() if names is None else names)}
        asked: dict[ReplicaName, Any] = {
            name: actor.place.remote() for name, actor in actors.items() if actor is not None
        }
        if not asked:
            return {}
        answered, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=limit_s)
        return {name: _answer(reference) if reference in answered else None for name, reference in asked.items()}

    def keep(self, text: str) -> None:
        """Remember the file that is applied. The older record goes once the newer one is there."""
        older = RECORDS.numbers()
        ray.get(RECORDS.begin(Record, text).text.remote(), timeout=self._start_timeout)
        RECORDS.end(older)

    def forget(self) -> None:
        RECORDS.end(RECORDS.numbers())


def kept(limit_s: float) -> str | None:
    """The file that was applied last."""
    record = RECORDS.newest()
    return None if record is None else str(ray.get(record.text.remote(), timeout=limit_s))


def deployed(limit_s: float) -> ClusterConfig | None:
    """The configuration that is deployed. limit_s: for the actor that keeps it, which Ray may be restarting."""
    text = kept(limit_s)
    return None if text is None else parse(text)


def looks(limit_s: float = ASK_LIMIT_S) -> list[dict[str, Any]]:
    """What the autoscaler has seen lately, if there is one that answers."""
    autoscaler = AUTOSCALERS.newest()
    if autoscaler is None:
        return []
    try:
        found: list[dict[str, Any]] = ray.get(autoscaler.looks.remote(), timeout=limit_s)
    except (GetTimeoutError, RayError):
        return []
    return found


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
    """Check that Ray answers and takes our token: Ray itself takes minutes to say so. Raises StackError."""
    target = address.removeprefix("ray://")
    if address == "auto":
        target = os.environ.get("RAY_ADDRESS", "") or _of_this_machine()
    host, _, port = target.rpartition(":")
    if host and port.isascii() and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), KNOCK_LIMIT_S).close()
        except (OSError, OverflowError) as error:
            raise StackError(f"no Ray cluster at {address}: {one_line(error)}") from None
        _show_token(target)


def _of_this_machine() -> str:
    """Where Ray notes the cluster that was started last; "" if it does not."""
    try:
        return Path("/tmp/ray/ray_current_cluster").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _show_token(target: str) -> None:
    """StackError if the cluster demands another token than there is."""
    token, source = ray_token()
    shown = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(target) as channel:
        ask = channel.unary_unary(ANY_METHOD, bytes, bytes)
        try:
            ask(b"", timeout=KNOCK_LIMIT_S, metadata=shown)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                given = f"refuses the token of {source}" if token else "demands a token"
                remedy = "have RAY_AUTH_TOKEN_PATH name a file with what `ray get-auth-token` prints on its head"
                raise StackError(f"the Ray cluster at {target} {given}: {remedy}") from None


def _options(group: Group, name: ReplicaName) -> dict[str, Any]:
    """The resources that Ray is asked for."""
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
    return options


def _bundle(group: Group) -> dict[str, float]:
    """What all ranks of a replica take, which is set aside on one node until the replica is gone for good.

    So while it starts again nobody else gets its devices. It is one bundle: an actor is within one, and the ranks are
    processes below it, which talk over pipes.
    """
    asked = {"CPU": group.num_cpus, "GPU": group.num_gpus, **group.resources}
    if group.accelerator_type:  # as Ray itself asks for one
        asked[f"accelerator_type:{group.accelerator_type}"] = 0.001
    return {resource: amount for resource, amount in asked.items() if amount}


def _give_back(name: str) -> None:
    """What was set aside for the replica, if anything was."""
    with suppress(ValueError):
        ray.util.remove_placement_group(ray.util.get_placement_group(name))


def _actor(name: str) -> Any | None:
    """None if it has gone, which it may do between any two questions."""
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def _answer(reference: Any) -> ReplicaPlace | None:
    try:
        place: ReplicaPlace = ray.get(reference)
    except RayError:
        return None
    return place


def _asked_for(group: Group) -> str:
    wanted = {"CPU": group.num_cpus, "GPU": group.num_gpus, group.accelerator_type: 1, **group.resources}
    told = ", ".join(f"{name}: {amount:g}" for name, amount in wanted.items() if name and amount)
    return f"each replica asks for a node with {told or 'nothing'} free"


# ----------------------------------------------------------------------------------------------------------------------
# A deployment's services, as the registry has them.

# An orchestrator looks at the registry every second, and says what it has found every two.
KNOWN_LIMIT_S = 20.0
PAUSE_S = 0.5


async def listed(url: str) -> tuple[ServiceEntry, ...]:
    """The registered services. Raises RegistryUnavailable."""
    directory = Directory.at(url)
    try:
        return (await directory.listing()).entries
    finally:
        await directory.close()


def are_known(addresses: Iterable[str], entries: Iterable[ServiceEntry]) -> bool:
    """Whether every orchestrator gives new sessions to the versions of these verifiers."""
    found = {entry.address: entry for entry in entries}
    verifiers = [found.get(address) for address in addresses]
    if None in verifiers:
        return False
    versions = [model for entry in verifiers if entry is not None for model in entry.models]
    serving = [
        entry for entry in found.values() if entry.role is Role.ORCHESTRATOR and entry.state is ServiceState.SERVING
    ]
    return all(each.identity in {model.identity for model in entry.models} for entry in serving for each in versions)


def wait_until_known(url: str, addresses: Iterable[str], limit_s: float = KNOWN_LIMIT_S) -> bool:
    """Whether `are_known` came to hold in time: of verifiers that have no room it may not."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            if are_known(addresses, asyncio.run(listed(url))):
                return True
        except RegistryUnavailable:
            pass  # it may answer again
        time.sleep(PAUSE_S)
    return False


# ----------------------------------------------------------------------------------------------------------------------
# The Ray actor that keeps a deployment's pools as large as their load asks: named, detached, one for a deployment.
#
# `specwire deploy` starts it where a pool may have more than one number of replicas. It keeps no state that matters: a
# restarted one, by Ray or by the next command, goes on from what it finds.

# Looks that can be asked for: an hour's of one pool.
KEPT_LOOKS = 720


class Autoscaler:
    """See Fleet and ScalingController. text: the file that was deployed."""

    def __init__(self, text: str, start_timeout: float) -> None:
        self._config = parse(text)
        self._fleet = Fleet(say_in_log, start_timeout, DRAIN_MARGIN_S)
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
                say_in_log(f"not this time: {error}")
            except Exception:  # a bug of ours: the next look may work
                logger.exception("a look at the deployment failed")

    def _look(self) -> None:
        places = self._fleet.places()
        entries = asyncio.run(listed(self._config.registry))
        orders = self._controller.look(places, entries, time.monotonic())
        self._looks += orders.looks
        carry_out(self._fleet, self._config, orders)
        for note in orders.notes:
            say_in_log(note)


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
