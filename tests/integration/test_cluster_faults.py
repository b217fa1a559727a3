"""Faults of a Ray cluster of several nodes, all on this machine: text is that of plain decoding, and goes on.

A partition is made by relays of our own: verifiers advertise an address of the loopback network at which nobody but a
relay listens, so all that orchestrators and verifiers tell each other goes through it. The registry and Ray go on
hearing from the verifier that nobody reaches, which is the harder case. Ray keeps its own state in Redis here, as it
does wherever its head shall be able to start again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from bench.cluster.site import Site, command_lines, site
from bench.harness.runs import BenchError
from bench.relay.link import RelayLink
from tests.faults.streams import Stream
from tests.integration.cluster import LIMIT_S, MORE, deploy, running
from tests.integration.pauses import Pause
from tests.orchestrator.redis_for_tests import RedisServer
from tests.ports import free_port
from tests.wait import eventually

# What was on its way is there by then.
GONE_S = 1.0
# Longer than anybody here waits.
FOR_EVER_S = 600.0
# Where relays listen for verifiers; Linux answers at all of 127.0.0.0/8.
RELAYED = "127.0.0.5"


@dataclass(frozen=True, slots=True)
class Deployed:
    """A site with everything running. links: to the verifiers, by their own addresses. fronts: the head's first."""

    site: Site
    links: Mapping[str, RelayLink]
    fronts: Sequence[str]


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    """Give a deployment with two of what has to go on: verifiers, each behind a relay, and orchestrators."""
    with ExitStack() as owned:
        memory = owned.enter_context(RedisServer(port=free_port(), bind="127.0.0.1"))
        owned.enter_context(pytest.MonkeyPatch.context()).setenv("RAY_REDIS_ADDRESS", memory.tcp)
        here = owned.enter_context(site({"front": 1, "head": 1}, {"front": 1, "small": 1}))
        for _ in range(2):
            here.cluster.add_node(num_cpus=1, resources={"big": 1}, env_vars={"SPECWIRE_ADVERTISE": RELAYED})
        links = owned.enter_context(deployed_behind_relays(here))
        rows, [head] = here.rows(), here.nodes_with("head")
        fronts = sorted((row for row in rows if row["pool"] == "orchestrators"), key=lambda row: row["node"] != head)
        assert [row["node"] == head for row in fronts] == [True, False]
        yield Deployed(here, links, [row["address"] for row in fronts])


@contextmanager
def deployed_behind_relays(here: Site) -> Iterator[dict[str, RelayLink]]:
    """Verifiers, relays to them as soon as there are any, and what waits for them; the relays last for the block."""

    def verifiers() -> list[str]:
        return [row["address"] for row in here.rows() if row["pool"] == "target" and row["state"] == "ready"]

    with ThreadPoolExecutor(1) as apart, ExitStack() as owned:
        deploying = apart.submit(deploy, here, 2, 2, 2)
        assert eventually(lambda: len(verifiers()) == 2 or deploying.done(), pause_s=1.0)
        links = {
            each: owned.enter_context(RelayLink(each, f"{RELAYED}:{each.rpartition(':')[2]}")) for each in verifiers()
        }
        deploying.result(LIMIT_S)
        yield links


def deciding(links: Mapping[str, RelayLink], stream: Stream) -> RelayLink:
    """The link to whoever decides for the only stream that runs."""
    before = {address: link.traffic().down.bytes for address, link in links.items()}
    stream.until(len(stream.tokens) + MORE)
    passed = {address: link.traffic().down.bytes - before[address] for address, link in links.items()}
    return links[max(passed, key=passed.__getitem__)]


def ready(deployed: Deployed) -> bool:
    """Whether every replica that there should be is there."""
    try:
        states = [row["state"] for row in deployed.site.rows()]
    except BenchError:  # Ray itself is being started again
        return False
    return len(states) == 5 and set(states) == {"ready"}


@pytest.mark.cluster
def test_a_partitioned_replica(deployed: Deployed, pauses: list[Pause]) -> None:
    with running(deployed.fronts) as stream:
        link, moment = deciding(deployed.links, stream), time.monotonic()
        link.stall(FOR_EVER_S)
        stream.until_arrived(moment + GONE_S)
        with running(deployed.fronts) as another:  # is placed where it can be decided, though the registry knows of two
            another.until(MORE)
        link.stall(0.0)
        stream.until(len(stream.tokens) + MORE)  # what the other one still holds, and says, is void
        pauses.append(Pause.of("a replica partitioned from the orchestrators (a relay stalls)", moment, stream))
    assert eventually(lambda: ready(deployed), pause_s=1.0)


@pytest.mark.cluster
def test_the_heads_actors_are_started_again(deployed: Deployed, pauses: list[Pause]) -> None:
    head: Any = deployed.site.cluster.head_node
    [raylet] = head.all_processes["raylet"]
    with running(deployed.fronts) as stream:
        actors = [
            pid
            for pid, line in command_lines(raylet.process.pid).items()
            if line.startswith(("ray::Replica", "ray::Record"))
        ]
        assert actors
        moment = time.monotonic()
        for pid in actors:
            os.kill(pid, signal.SIGKILL)
        stream.until_arrived(moment + GONE_S)
        assert stream.breaks
        assert eventually(lambda: ready(deployed), pause_s=1.0)
        stream.until(len(stream.tokens) + MORE)
        pauses.append(Pause.of("the head's actors killed, the client's orchestrator among them", moment, stream))
    assert not set(actors) & set(command_lines(raylet.process.pid))
    assert "target: unchanged (2 -> 2)" in deployed.site.specwire("scale", "target=2")


@pytest.mark.cluster
def test_the_heads_control_plane_is_started_again(deployed: Deployed, pauses: list[Pause]) -> None:
    """Ray's own state comes back from Redis; no token waits for it."""
    head: Any = deployed.site.cluster.head_node
    fronts = [row["address"] for row in deployed.site.rows() if row["pool"] == "orchestrators"]
    with running(fronts) as stream:
        moment = time.monotonic()
        head.kill_gcs_server()
        stream.until_arrived(moment + GONE_S)
        head.start_gcs_server()
        stream.until(len(stream.tokens) + MORE)
        pauses.append(Pause.of("the head's control plane (GCS) killed and started again", moment, stream))
    assert eventually(lambda: ready(deployed), pause_s=1.0)
