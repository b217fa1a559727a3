"""`specwire status`: the replicas of a deployment, and where they are."""

from __future__ import annotations

import argparse
import json

from deploy.cluster.command import add_cluster_arguments, carried_out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    return carried_out("status", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    from deploy.cluster.fleet import ASK_LIMIT_S, Fleet, connected  # Ray comes with it

    with connected(args.ray_address, args.namespace):
        places = Fleet(print, ASK_LIMIT_S, ASK_LIMIT_S).places()
    rows = [
        {
            "pool": name.group,
            "replica": str(name),
            "state": "away" if place is None else "ready" if place.address else "starting",
            "address": place.address if place is not None else "",
            "http": place.http if place is not None else "",
            "node": place.node if place is not None else "",
        }
        for name, place in sorted(places.items())
    ]
    print(json.dumps({"replicas": rows}) if args.json else table(rows))
    return 0


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
