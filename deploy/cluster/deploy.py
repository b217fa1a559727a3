"""`specwire deploy`: make a Ray cluster run what a file says."""

from __future__ import annotations

import argparse
from pathlib import Path

from deploy.cluster.command import add_cluster_arguments, add_waiting_arguments, carried_out, drain_timeout_of
from deploy.cluster.planning import plan
from deploy.cluster.schema import parse, read_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="CONFIG", help="YAML with pools and orchestrators (docs/DEPLOY.md)")
    add_cluster_arguments(parser)
    add_waiting_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="say what would change, and change nothing")


def run(args: argparse.Namespace) -> int:
    return carried_out("deploy", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    text = read_text(Path(args.file))
    config = parse(text)
    from deploy.cluster.autoscaler import changing
    from deploy.cluster.fleet import Fleet, connected

    with connected(args.ray_address, args.namespace):
        fleet = Fleet(print, args.start_timeout, drain_timeout_of(args, config))
        if args.dry_run:
            print("\n".join(map(str, plan(config, fleet.seen()))))
            return 0
        with changing(fleet, args.start_timeout):
            fleet.keep(text)
            fleet.apply(config, plan(config, fleet.seen()))
    return 0
