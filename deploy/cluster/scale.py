"""`specwire scale`: another number of replicas, within the bounds of the file that was deployed."""

from __future__ import annotations

import argparse

from deploy.cluster.command import add_cluster_arguments, add_waiting_arguments, carried_out, drain_timeout_of
from deploy.cluster.planning import plan
from deploy.cluster.schema import MOST_REPLICAS, ORCHESTRATORS, ClusterConfig, Group, InvalidConfig
from deploy.stack.options import StackError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("wanted", nargs="+", metavar="POOL=N", help="replicas of a pool")
    add_cluster_arguments(parser)
    add_waiting_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return carried_out("scale", lambda: _run(args))


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


def _run(args: argparse.Namespace) -> int:
    from deploy.cluster.autoscaler import changing
    from deploy.cluster.fleet import Fleet, connected, deployed

    with connected(args.ray_address, args.namespace):
        config = deployed(args.start_timeout)
        if config is None:
            raise StackError(f"nothing is deployed in the namespace {args.namespace}")
        counts = counts_of(args.wanted, config)
        fleet = Fleet(print, args.start_timeout, drain_timeout_of(args, config))
        with changing(fleet, args.start_timeout):
            fleet.apply(config, plan(config, fleet.seen(), counts))
    return 0
