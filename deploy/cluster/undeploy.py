"""`specwire undeploy`: drain and end all replicas of a deployment."""

from __future__ import annotations

import argparse

from deploy.cluster.command import (
    START_TIMEOUT_S,
    add_cluster_arguments,
    add_drain_argument,
    carried_out,
    drain_timeout_of,
)
from deploy.cluster.planning import removal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)
    add_drain_argument(parser)
    parser.add_argument("--dry-run", action="store_true", help="say what would go, and change nothing")


def run(args: argparse.Namespace) -> int:
    return carried_out("undeploy", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    from deploy.cluster.fleet import Fleet, connected, deployed  # Ray comes with it

    with connected(args.ray_address, args.namespace):
        fleet = Fleet(print, START_TIMEOUT_S, drain_timeout_of(args, deployed(START_TIMEOUT_S)))
        if args.dry_run:
            print("\n".join(map(str, removal(fleet.seen()))))
            return 0
        fleet.take_over()
        fleet.apply(None, removal(fleet.seen()))
        fleet.forget()
    return 0
