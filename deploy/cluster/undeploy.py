"""`specwire undeploy`: drain and end all replicas of a deployment."""

from __future__ import annotations

import argparse

from deploy.cluster.command import START_TIMEOUT_S, add_cluster_arguments, add_drain_argument, carried_out
from deploy.cluster.planning import removal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)
    add_drain_argument(parser)
    parser.add_argument("--dry-run", action="store_true", help="say what would go, and change nothing")


def run(args: argparse.Namespace) -> int:
    return carried_out("undeploy", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    from deploy.cluster.fleet import Fleet, connected  # Ray comes with it

    with connected(args.ray_address, args.namespace):
        fleet = Fleet(print, START_TIMEOUT_S, args.drain_timeout)
        changes = removal(fleet.seen())
        if args.dry_run:
            print("\n".join(map(str, changes)))
            return 0
        fleet.apply(None, changes)
        fleet.forget()
    return 0
