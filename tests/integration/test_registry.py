"""Services that find each other in Redis, as processes, and boxes outside: a drafter that dials in, a whole edge.

They come, are killed and drain while sessions run. A box serves sessions of its own region, may vanish at any time, and
nobody's text changes.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import grpc
import pytest

from specwire.core.placement import NEAR_US
from specwire.registry.directory import Directory
from specwire.registry.entry import Role, ServiceEntry, ServiceState
from specwire.v1 import status_pb2, status_pb2_grpc
from tests.faults.parts import Parts, ServiceProcess, parts
from tests.faults.streams import Stream, plain
from tests.options import private
from tests.orchestrator.redis_for_tests import RedisServer
from tests.wait import eventually

SPEC = "scripted:7:vocab=64"
TARGET, DRAFT = f"{SPEC}:delay_ms=30", f"{SPEC}:agree=0.8"
TOKEN, BOX = "a-box-of-ours-that-drafts", "the box"
LIMIT_S = 120.0
# More than there is time for: a session that ends by itself would not have been moved.
LENGTH = 4000
MORE = 40


def registered(url: str) -> dict[str, ServiceEntry]:
    """By address."""

    async def listed() -> dict[str, ServiceEntry]:
        directory = Directory.at(url)
        try:
            return {entry.address: entry for entry in (await directory.listing()).entries}
        finally:
            await directory.close()

    return asyncio.run(listed())


def peers(orchestrator: ServiceProcess, kind: status_pb2.PeerKind | None = None) -> dict[str, status_pb2.PeerStatus]:
    """By address, as the orchestrator sees them, those of a kind or all; a box that dialled in is called BOX."""
    with grpc.insecure_channel(orchestrator.address) as channel:
        status = status_pb2_grpc.StatusServiceStub(channel).GetStatus(status_pb2.GetStatusRequest(), timeout=LIMIT_S)
    found = [peer for peer in status.peers if kind in (None, peer.kind)]
    return {BOX if peer.address.startswith("drafter ") else peer.address: peer for peer in found}


def up(orchestrator: ServiceProcess, *kinds: status_pb2.PeerKind) -> dict[str, int]:
    """How many sessions each peer of these kinds has that is up; an orchestrator may list itself, or not yet."""
    found = {at: peer for kind in kinds for at, peer in peers(orchestrator, kind).items()}
    return {at: peer.sessions for at, peer in found.items() if peer.state == status_pb2.PEER_STATE_UP}


VERIFIERS, DRAFTERS = status_pb2.PEER_KIND_VERIFIER, status_pb2.PEER_KIND_DRAFTER


def test_services_come_and_go_while_sessions_run(owned: Parts, redis: RedisServer) -> None:
    there = ("--registry", redis.url)
    orchestrator = owned.start("orchestrate", *there, "--redis-url", redis.url)
    first, second = (owned.start("verify", TARGET, *there, "--grace", "0.5") for _ in range(2))
    drafter = owned.start("draft", DRAFT, *there)
    for service in (first, second, drafter, orchestrator):
        service.ready()
    services = {first.address, second.address, drafter.address}
    assert eventually(lambda: up(orchestrator, VERIFIERS, DRAFTERS).keys() == services)

    def are_near() -> bool:
        return all(0 < peer.round_trip_us < NEAR_US for peer in peers(orchestrator, VERIFIERS).values())

    # A busy machine's first ping may be so long that the service seems far away; the least of several is not.
    assert eventually(are_near)
    with ExitStack() as stack:

        def begin() -> Stream:
            stream = stack.enter_context(Stream(orchestrator.address, patience=LIMIT_S, max_tokens=LENGTH))
            stream.until(3)
            return stream

        streams = [begin() for _ in range(4)]
        seen = peers(orchestrator)
        assert [seen[each.address].sessions for each in (first, second)] == [2, 2]
        assert seen[drafter.address].sessions == 4
        streams[0].until_accepted()

        third = owned.start("verify", TARGET, *there)
        third.ready()
        assert eventually(lambda: third.address in up(orchestrator, VERIFIERS))
        streams.append(begin())
        assert peers(orchestrator)[third.address].sessions == 1

        first.kill()
        second.send(signal.SIGTERM)
        assert eventually(
            lambda: registered(redis.url)[second.address].state is ServiceState.DRAINING or not second.lives
        )
        drafter.kill()
        begun = begin()
        assert peers(orchestrator)[third.address].sessions >= 2
        assert second.wait() == 0
        assert second.address not in registered(redis.url)
        for stream in (*streams, begun):
            stream.until(len(stream.tokens) + MORE)
        expected = plain(SPEC, max(len(stream.tokens) for stream in streams))
        assert all(stream.tokens == expected[: len(stream.tokens)] for stream in (*streams, begun))

    assert eventually(lambda: registered(redis.url).keys() == {third.address, orchestrator.address})
    left = registered(redis.url)
    assert (left[third.address].role, left[third.address].slots) == (Role.VERIFIER, 16)
    assert left[orchestrator.address].models == left[third.address].models
    assert orchestrator.end() == ""
    assert third.end() == ""
    assert registered(redis.url) == {}


@dataclass(frozen=True, slots=True)
class Site:
    """A verifier and a drafter in the cloud, an orchestrator there and one at home; drafters with a token may join."""

    registry: str
    cloud: ServiceProcess
    home: ServiceProcess
    token: str
    owned: Parts

    def box(self) -> ServiceProcess:
        """One command, outside: it dials both."""
        dial = (part for each in (self.cloud, self.home) for part in ("--connect", each.address))
        return self.owned.start("draft", DRAFT, *dial, "--region", "home", "--token-file", self.token)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("keys")
    keys, token = private(folder / "keys", f"box {TOKEN}\n"), private(folder / "token", TOKEN)
    with RedisServer() as redis, parts() as owned:
        known = ("--registry", redis.url)
        cloud = (*known, "--region", "cloud")
        joined = ("--redis-url", redis.url, "--accept-drafters", "--drafter-keys", keys)
        verifier = owned.start("verify", TARGET, *cloud)
        drafter = owned.start("draft", DRAFT, *cloud)
        orchestrators = [owned.start("orchestrate", *known, "--region", name, *joined) for name in ("cloud", "home")]
        for service in (verifier, drafter, *orchestrators):
            service.ready()
        for each in orchestrators:
            assert eventually(there(each, drafter.address))
        yield Site(redis.url, orchestrators[0], orchestrators[1], token, owned)


def there(orchestrator: ServiceProcess, name: str) -> Callable[[], bool]:
    return lambda: name in up(orchestrator, DRAFTERS)


def test_a_box_serves_its_own_region_and_vanishes(site: Site) -> None:
    box = site.box()
    box.ready()
    for each in (site.cloud, site.home):
        assert eventually(there(each, BOX))
    with ExitStack() as stack:
        streams = [stack.enter_context(Stream(each.address, max_tokens=LENGTH)) for each in (site.cloud, site.home)]
        for stream in streams:
            stream.until_accepted()
        assert up(site.home, DRAFTERS)[BOX] == 1
        assert up(site.cloud, DRAFTERS)[BOX] == 0
        box.kill()
        assert eventually(lambda: BOX not in up(site.home, DRAFTERS))
        for stream in streams:
            stream.until(len(stream.tokens) + MORE)
        # The cloud's drafter has taken the session over.
        assert eventually(lambda: list(up(site.home, DRAFTERS).values()) == [1])
        streams[1].until_accepted()

        again = site.box()
        again.ready()
        assert eventually(there(site.home, BOX))
        streams.append(stack.enter_context(Stream(site.home.address, max_tokens=LENGTH)))
        streams[2].until_accepted()
        assert up(site.home, DRAFTERS)[BOX] == 1
        assert again.end() == ""
        for stream in streams:
            stream.until(len(stream.tokens) + MORE)
            assert stream.tokens == plain(SPEC, len(stream.tokens))


def test_an_edge_finds_its_verifiers_in_the_registry(site: Site) -> None:
    """It drafts for its own sessions, and a verifier that goes, the nearest one, is not their end."""
    known = ("--registry", site.registry, "--region", "home")
    edge = site.owned.start("edge", *known, "--draft", DRAFT)
    near = site.owned.start("verify", TARGET, *known, "--grace", "0.5")
    for service in (near, edge):
        service.ready()
    assert eventually(lambda: len(up(edge, VERIFIERS)) == 2)
    with Stream(edge.address, max_tokens=LENGTH) as stream:
        stream.until_accepted()
        assert up(edge, DRAFTERS)["the drafter in this process"] == 1
        assert up(edge, VERIFIERS)[near.address] == 1
        assert near.end() == ""
        stream.until(len(stream.tokens) + MORE)
        assert stream.tokens == plain(SPEC, len(stream.tokens))
    assert edge.end() == ""
