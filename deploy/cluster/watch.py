"""The loop of `specwire deploy --watch`: each pool's load as the registry has it, and what scaling makes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping

from deploy.cluster.fleet import Fleet
from deploy.cluster.planning import ReplicaName, plan
from deploy.cluster.replica import Place
from deploy.cluster.scaling import Memory, Reading, Rule, decide
from deploy.cluster.schema import ORCHESTRATORS, ClusterConfig
from specwire.registry.directory import Directory, RegistryUnavailable
from specwire.registry.entry import Entry
from specwire.rpc.process import say

EVERY_S = 5.0


def watch(fleet: Fleet, config: ClusterConfig) -> None:
    """Go on until the process is interrupted."""
    memories = {group.name: Memory() for group in config.groups if group.name != ORCHESTRATORS}
    while True:
        time.sleep(EVERY_S)
        try:
            entries = asyncio.run(listed(config.registry))
        except RegistryUnavailable as error:
            say(f"specwire deploy: {error}")
            continue
        counts = wanted(config, memories, readings(fleet.places(), entries), time.monotonic())
        changes = [change for change in plan(config, fleet.seen(), counts) if change.start or change.drain]
        fleet.apply(config, changes)


def wanted(
    config: ClusterConfig, memories: dict[str, Memory], found: Mapping[str, Reading], now: float
) -> dict[str, int]:
    """Replicas by pool; `memories` is brought up to now."""
    counts = {}
    for name, memory in memories.items():
        group = config.group(name)
        if group is not None and name in found:
            counts[name], memories[name] = decide(Rule(group.least, group.most), memory, found[name], now)
    return counts


def readings(places: Mapping[ReplicaName, Place | None], entries: Iterable[Entry]) -> dict[str, Reading]:
    """Each pool's load, as those of its replicas say it that are in the registry."""
    loads = {entry.address: entry for entry in entries}
    found: dict[str, Reading] = {}
    for name, place in places.items():
        before = found.get(name.group, Reading(0, 0, 0, 0))
        entry = loads.get(place.address) if place is not None else None
        found[name.group] = Reading(
            before.replicas + 1,
            before.running + (entry.load.running if entry else 0),
            before.waiting + (entry.load.waiting if entry else 0),
            before.slots + (entry.slots if entry else 0),
        )
    return found


async def listed(url: str) -> tuple[Entry, ...]:
    """Who is in the registry. Raises RegistryUnavailable."""
    directory = Directory.at(url)
    try:
        return (await directory.listing()).entries
    finally:
        await directory.close()
