"""`specwire status`: the replicas of a deployment, where they are, and what their load asks for."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from typing import Any

from deploy.cluster.command import add_cluster_arguments, carried_out
from deploy.cluster.planning import ReplicaName, ReplicaPlace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    return carried_out("status", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
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
    """A line for each pool that scales: its latest look (`deploy.cluster.steering.Look`)."""
    return [
        _line(pool, look["reading"], look["wanted"]) for pool, look in {each["pool"]: each for each in looks}.items()
    ]


def _line(pool: str, reading: Mapping[str, Any], wanted: int) -> str:
    slots = f"slots taken {reading['running']} of {reading['slots']}"
    waiting = f"waiting {reading['waiting']}, longest {reading['queue_s']:.1f} s"
    late = f"late drafts {reading['misses']:.0%}"
    return f"{pool}: replicas {reading['replicas']}, wanted {wanted}; {slots}; {waiting}; {late}"
