"""Services that find each other in Redis, as processes: they come, are killed and drain while sessions run."""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack

import grpc

from specwire.core.placement import NEAR_US
from specwire.registry.directory import Directory
from specwire.registry.entry import Role, ServiceEntry, ServiceState
from specwire.v1 import status_pb2, status_pb2_grpc
from tests.faults.parts import Parts, ServiceProcess
from tests.faults.streams import Stream, plain
from tests.orchestrator.redis_for_tests import RedisServer
from tests.wait import eventually

TARGET = "scripted:7:vocab=64:delay_ms=30"
DRAFT = "scripted:7:vocab=64:agree=0.8"
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


def peers(orchestrator: ServiceProcess) -> dict[str, status_pb2.PeerStatus]:
    """By address, as the orchestrator sees them."""
    with grpc.insecure_channel(orchestrator.address) as channel:
        status = status_pb2_grpc.StatusServiceStub(channel).GetStatus(status_pb2.GetStatusRequest(), timeout=LIMIT_S)
    return {peer.address: peer for peer in status.peers}


def up(orchestrator: ServiceProcess) -> set[str]:
    """Its verifiers and drafters; it is registered itself, and may list itself by then or not."""
    services = {at: peer for at, peer in peers(orchestrator).items() if peer.kind != status_pb2.PEER_KIND_ORCHESTRATOR}
    return {at for at, peer in services.items() if peer.state == status_pb2.PEER_STATE_UP}


def round_trips_us(orchestrator: ServiceProcess, *services: ServiceProcess) -> list[int]:
    seen = peers(orchestrator)
    return [seen[service.address].round_trip_us for service in services]


def test_services_come_and_go_while_sessions_run(owned: Parts, redis: RedisServer) -> None:
    there = ("--registry", redis.url)
    orchestrator = owned.start("orchestrate", *there, "--redis-url", redis.url)
    first, second = (owned.start("verify", TARGET, *there, "--grace", "0.5") for _ in range(2))
    drafter = owned.start("draft", DRAFT, *there)
    for service in (first, second, drafter, orchestrator):
        service.ready()
    assert eventually(lambda: up(orchestrator) == {first.address, second.address, drafter.address})
    # A busy machine's first ping may be so long that the service seems far away; the least of several is not.
    assert eventually(lambda: all(0 < each < NEAR_US for each in round_trips_us(orchestrator, first, second)))
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
        assert eventually(lambda: third.address in up(orchestrator))
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
        expected = plain(TARGET.rpartition(":")[0], max(len(stream.tokens) for stream in streams))
        assert all(stream.tokens == expected[: len(stream.tokens)] for stream in (*streams, begun))

    assert eventually(lambda: registered(redis.url).keys() == {third.address, orchestrator.address})
    left = registered(redis.url)
    assert (left[third.address].role, left[third.address].slots) == (Role.VERIFIER, 16)
    assert left[orchestrator.address].models == left[third.address].models
    assert orchestrator.end() == ""
    assert third.end() == ""
    assert registered(redis.url) == {}
