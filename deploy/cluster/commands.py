"""`specwire deploy`, `status`, `scale` and `undeploy`. Ray is imported only by the command that runs."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.cluster.rollout import ReplicaName, ReplicaPlace, plan, removal
from deploy.cluster.schema import (
    DRAIN_MARGIN_S,
    MOST_REPLICAS,
    ORCHESTRATORS,
    RAY_AUTH_MODE,
    ClusterConfig,
    Group,
    InvalidConfig,
    parse,
    ray_token,
    read_text,
)
from deploy.stack.options import StackError
from specwire.options import CLUSTER_START_S, add_options
from specwire.rpc.process import say


def drain_timeout_of(args: argparse.Namespace, config: ClusterConfig | None) -> float:
    """Seconds; config: what is deployed, or will be."""
    if args.drain_timeout is not None:
        return float(args.drain_timeout)
    return max((group.grace for group in config.groups), default=0.0) + DRAIN_MARGIN_S if config else DRAIN_MARGIN_S


def carried_out(command: str, what: Callable[[], int]) -> int:
    """Run it; returns the exit code, with one line on stderr for any error."""
    prefix = f"specwire {command}: error:"
    if importlib.util.find_spec("ray") is None:
        say(f"{prefix} Ray is not installed: install the extra specwire[ray]")
        return 1
    if ray_token()[0]:
        os.environ.setdefault(RAY_AUTH_MODE, "token")  # Ray reads it when it is imported, as `what` does
    try:
        return what()
    except InvalidConfig as error:
        say(f"{prefix} {error}")
        return 2
    except StackError as error:
        say(f"{prefix} {error}")
        return 1


@dataclass(frozen=True, slots=True)
class ClusterCommand:
    """A command that needs Ray, as a `deploy.settings.Module`."""

    name: str
    work: Callable[[argparse.Namespace], int]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_options(parser, self.name)

    def run(self, args: argparse.Namespace) -> int:
        return carried_out(self.name, lambda: self.work(args))


# ----------------------------------------------------------------------------------------------------------------------
# `specwire deploy`: make a Ray cluster run what a file says.


def _deploy(args: argparse.Namespace) -> int:
    text = read_text(Path(args.file))
    config = parse(text)
    from deploy.cluster.fleet import Fleet, changing, connected

    with connected(args.ray_address, args.namespace):
        fleet = Fleet(print, args.start_timeout, drain_timeout_of(args, config))
        if args.dry_run:
            print("\n".join(map(str, plan(config, fleet.seen()))))
            return 0
        with changing(fleet, args.start_timeout):
            fleet.keep(text)
            fleet.apply(config, plan(config, fleet.seen()))
    return 0


# ----------------------------------------------------------------------------------------------------------------------
# `specwire undeploy`: drain and end all replicas of a deployment.


def _undeploy(args: argparse.Namespace) -> int:
    from deploy.cluster.fleet import Fleet, connected, deployed  # Ray comes with it

    with connected(args.ray_address, args.namespace):
        fleet = Fleet(print, CLUSTER_START_S, drain_timeout_of(args, deployed(CLUSTER_START_S)))
        if args.dry_run:
            print("\n".join(map(str, removal(fleet.seen()))))
            return 0
        fleet.take_over()
        fleet.apply(None, removal(fleet.seen()))
        fleet.forget()
    return 0


# ----------------------------------------------------------------------------------------------------------------------
# `specwire scale`: another number of replicas, within the bounds of the file that was deployed.


def _scale(args: argparse.Namespace) -> int:
    from deploy.cluster.fleet import Fleet, changing, connected, deployed

    with connected(args.ray_address, args.namespace):
        config = deployed(args.start_timeout)
        if config is None:
            raise StackError(f"nothing is deployed in the namespace {args.namespace}")
        counts = counts_of(args.wanted, config)
        fleet = Fleet(print, args.start_timeout, drain_timeout_of(args, config))
        with changing(fleet, args.start_timeout):
            fleet.apply(config, plan(config, fleet.seen(), counts))
    return 0


def counts_of(words: list[str], config: ClusterConfig) -> dict[str, int]:
    """Replicas by pool. Raises InvalidConfig."""
    return {name: count for word in words for name, count in [_count_of(word, config)]}


def _count_of(word: str, config: ClusterConfig) -> tuple[str, int]:
    name, equals, text = word.partition("=")
    if not (equals and text.isascii() and text.isdecimal()):
        raise InvalidConfig("POOL=N", f"must be a pool and a whole number, not {word!r}")
    group = config.group(name)
    if group is None:
        known = ", ".join(group.name for group in config.groups)
        raise InvalidConfig("POOL=N", f"there is no pool {name!r}; there are {known}")
    count = int(text) if len(text) < len(str(MOST_REPLICAS)) + 1 else MOST_REPLICAS + 1
    if not group.least <= count <= group.most:
        raise InvalidConfig(*_bounds(group, text))
    return name, count


def _bounds(group: Group, wanted: str) -> tuple[str, str]:
    """The key whose value bounds the group, and why `wanted` does not fit."""
    if group.name == ORCHESTRATORS:
        return f"{ORCHESTRATORS}.count", f"is {group.most}, not {wanted}: change it in the file, and deploy that"
    key = f"pools.{group.name}"
    if not group.scales:
        why = f"its file gives it no max_replicas above {group.least}: add max_replicas, and deploy the file again"
        return key, f"cannot be scaled from {group.least} to {wanted}: {why}"
    return key, f"has from {group.least} (min_replicas) to {group.most} (max_replicas) replicas, not {wanted}"


# ----------------------------------------------------------------------------------------------------------------------
# `specwire status`: the replicas of a deployment, where they are, and what their load asks for.


def _status(args: argparse.Namespace) -> int:
    from deploy.cluster.fleet import ASK_LIMIT_S, Fleet, connected, looks  # Ray comes with it

    with connected(args.ray_address, args.namespace):
        rows = [row(name, place) for name, place in sorted(Fleet(print, ASK_LIMIT_S, ASK_LIMIT_S).places().items())]
        seen = looks()
    if args.json:
        print(json.dumps({"replicas": rows, "looks": seen}))
    else:
        print("\n".join([table(rows), *scaling(seen)]))
    return 0


def row(name: ReplicaName, place: ReplicaPlace | None) -> dict[str, str]:
    return {
        "pool": name.group,
        "replica": str(name),
        "state": _state(place),
        "address": place.address if place is not None else "",
        "http": place.http if place is not None else "",
        "node": place.node if place is not None else "",
    }


def _state(place: ReplicaPlace | None) -> str:
    if place is None:
        return "away"
    if place.draining:
        return "draining"
    return "ready" if place.address else "failed" if place.error else "starting"


def table(rows: list[dict[str, str]]) -> str:
    """A line for each replica; a sentence where there is none."""
    if not rows:
        return "nothing is deployed"
    told = [(row["replica"], row["state"], row["address"], row["http"], row["node"][:12]) for row in rows]
    shown = [[each or "-" for each in row] for row in told]
    widths = [max(len(each) for each in column) for column in zip(*shown, strict=True)]
    return "\n".join(
        "  ".join(each.ljust(width) for each, width in zip(row, widths, strict=True)).rstrip() for row in shown
    )


def scaling(looks: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each pool that scales: its latest look (`deploy.cluster.scaling.PoolSample`)."""
    return [
        _line(pool, look["reading"], look["wanted"]) for pool, look in {each["pool"]: each for each in looks}.items()
    ]


def _line(pool: str, reading: Mapping[str, Any], wanted: int) -> str:
    slots = f"slots taken {reading['running']} of {reading['slots']}"
    waiting = f"waiting {reading['waiting']}, longest {reading['queue_s']:.1f} s"
    return f"{pool}: replicas {reading['replicas']}, wanted {wanted}; {slots}; {waiting}"


DEPLOY = ClusterCommand("deploy", _deploy)
UNDEPLOY = ClusterCommand("undeploy", _undeploy)
SCALE = ClusterCommand("scale", _scale)
STATUS = ClusterCommand("status", _status)
