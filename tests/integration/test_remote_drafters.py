"""A deployment that finds itself in a registry, and boxes outside it: a drafter that dials in, a whole edge.

All are processes. The box serves sessions of its own region, may vanish at any time, and nobody's text changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import grpc
import pytest

from specwire.v1 import status_pb2, status_pb2_grpc
from tests.faults.parts import Parts, ServiceProcess, parts
from tests.faults.streams import Stream, plain
from tests.orchestrator.redis_for_tests import RedisServer
from tests.wait import eventually

SPEC = "scripted:7:vocab=64"
TARGET = f"{SPEC}:delay_ms=30"
DRAFT = f"{SPEC}:agree=0.8"
TOKEN = "a-box-of-ours-that-drafts"
BOX = "the box"
LIMIT_S = 120.0
LENGTH = 4000
MORE = 40


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
    for name, content in (("keys", f"box {TOKEN}\n"), ("token", TOKEN)):
        (folder / name).write_text(content)
        (folder / name).chmod(0o600)
    with RedisServer() as redis, parts() as owned:
        known = ("--registry", redis.url)
        cloud = (*known, "--region", "cloud")
        joined = ("--redis-url", redis.url, "--accept-drafters", "--drafter-keys", str(folder / "keys"))
        verifier = owned.start("verify", TARGET, *cloud)
        drafter = owned.start("draft", DRAFT, *cloud)
        orchestrators = [owned.start("orchestrate", *known, "--region", name, *joined) for name in ("cloud", "home")]
        for service in (verifier, drafter, *orchestrators):
            service.ready()
        for each in orchestrators:
            assert eventually(there(each, drafter.address))
        yield Site(redis.url, orchestrators[0], orchestrators[1], str(folder / "token"), owned)


def up(orchestrator: ServiceProcess, kind: status_pb2.PeerKind) -> list[status_pb2.PeerStatus]:
    with grpc.insecure_channel(orchestrator.address) as channel:
        status = status_pb2_grpc.StatusServiceStub(channel).GetStatus(status_pb2.GetStatusRequest(), timeout=LIMIT_S)
    return [peer for peer in status.peers if peer.kind == kind and peer.state == status_pb2.PEER_STATE_UP]


def drafters(orchestrator: ServiceProcess) -> dict[str, int]:
    """How many sessions each has that is up, by its address; a box that dialled in is called BOX."""
    found = up(orchestrator, status_pb2.PEER_KIND_DRAFTER)
    return {BOX if peer.address.startswith("drafter ") else peer.address: peer.sessions for peer in found}


def verifiers(orchestrator: ServiceProcess) -> dict[str, int]:
    return {peer.address: peer.sessions for peer in up(orchestrator, status_pb2.PEER_KIND_VERIFIER)}


def there(orchestrator: ServiceProcess, name: str) -> Callable[[], bool]:
    return lambda: name in drafters(orchestrator)


def test_a_box_serves_its_own_region_and_vanishes(site: Site) -> None:
    box = site.box()
    box.ready()
    for each in (site.cloud, site.home):
        assert eventually(there(each, BOX))
    with ExitStack() as stack:
        streams = [stack.enter_context(Stream(each.address, max_tokens=LENGTH)) for each in (site.cloud, site.home)]
        for stream in streams:
            stream.until_accepted()
        assert drafters(site.home)[BOX] == 1
        assert drafters(site.cloud)[BOX] == 0
        box.kill()
        assert eventually(lambda: BOX not in drafters(site.home))
        for stream in streams:
            stream.until(len(stream.tokens) + MORE)
        # The cloud's drafter has taken the session over.
        assert eventually(lambda: list(drafters(site.home).values()) == [1])
        streams[1].until_accepted()

        again = site.box()
        again.ready()
        assert eventually(there(site.home, BOX))
        streams.append(stack.enter_context(Stream(site.home.address, max_tokens=LENGTH)))
        streams[2].until_accepted()
        assert drafters(site.home)[BOX] == 1
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
    assert eventually(lambda: len(verifiers(edge)) == 2)
    with Stream(edge.address, max_tokens=LENGTH) as stream:
        stream.until_accepted()
        assert drafters(edge)["the drafter in this process"] == 1
        assert verifiers(edge)[near.address] == 1
        assert near.end() == ""
        stream.until(len(stream.tokens) + MORE)
        assert stream.tokens == plain(SPEC, len(stream.tokens))
    assert edge.end() == ""
