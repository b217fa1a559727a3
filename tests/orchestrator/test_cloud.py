"""Edges and drafters elsewhere, which find their peers by a RegistryService in front of a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

import draft_service.server
import verify_service.server
from deploy.cli.services import registry
from deploy.cli.services.registry import RegistryServiceOptions, RunningRegistry
from draft_service.dialler import DiallingDrafter
from orchestrator.server import RunningOrchestrator
from specwire.core.placement import Reason
from specwire.registry.options import CloudOptions, RegistryOptions
from specwire.rpc.server_options import ModelServiceOptions
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.stack import DRAFT, SLOW_TARGET, TARGET, Services, plain
from tests.orchestrator.test_registered import PROMPT, said, verifiers_up
from tests.ports import free_address
from tests.rpc.relay import Relay
from tests.wait import asked, until

OTHER_MODEL = "scripted:8:vocab=64:delay_ms=5"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


class Cloud(Services):
    """With a RegistryService; edges know its address only."""

    address = ""

    async def tell(self) -> RunningRegistry:
        running = await registry.start(RegistryServiceOptions(self.registry().url, self.address))
        self.owned.push_async_callback(running.stop, 0.0)
        return running

    async def edge(self, *models: str, region: str = "", **more: Any) -> RunningOrchestrator:
        cloud = CloudOptions(self.address, models)
        return await self.orchestrator(cloud=cloud, registration=RegistryOptions(region=region), **more)

    async def dialling(self) -> DiallingDrafter:
        dialled = draft_service.server.dial_in(ModelServiceOptions(DRAFT), "", None, cloud=CloudOptions(self.address))
        running = await asyncio.wait_for(dialled, 60.0)
        self.owned.push_async_callback(running.stop)
        return running


@pytest.fixture
async def cloud(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cloud]:
    for name in ("orchestrator.peers.discovery", "specwire.registry.service", "draft_service.dialler"):
        monkeypatch.setattr(f"{name}.LOOK_S", 0.1)
    for name in ("orchestrator.peers.peer", "draft_service.dialler"):
        monkeypatch.setattr(f"{name}.GIVEN_UP_S", 1.0)
    server.mend()
    async with AsyncExitStack() as parts:
        made = Cloud(parts, server)
        made.address = free_address()
        yield made


async def test_an_edge_finds_its_verifier_and_moves_when_that_drains_or_is_lost(cloud: Cloud) -> None:
    await cloud.tell()
    first = await cloud.verifier()
    edge = await cloud.edge()
    await until(verifiers_up(edge, 1))
    client = await cloud.client(edge)
    long = asyncio.create_task(said(client, PROMPT, length=400))
    await until(lambda: bool(edge.orchestrator.sessions))
    second = await cloud.verifier()
    await until(verifiers_up(edge, 2))
    await first.stop(0.2)  # it drains, and ends
    homes = edge.orchestrator.pool.affinity
    assert list((await long).tokens) == plain(TARGET, PROMPT, 400)
    assert homes.of((await long).session_id) == second.address
    await until(lambda: len(edge.orchestrator.pool.verifiers) == 1)  # the first is not dialled any more
    back = await cloud.verifier(listen=first.address)
    await until(verifiers_up(edge, 2))
    await asked(lambda: said(client, PROMPT), lambda turn: homes.of(turn.session_id) == back.address)


async def test_an_edge_takes_what_serves_its_model(cloud: Cloud) -> None:
    await cloud.tell()
    await cloud.verifier(OTHER_MODEL)
    ours = await cloud.verifier()
    edge = await cloud.edge("scripted:7")
    await until(verifiers_up(edge, 1))
    assert [each.link.address for each in edge.orchestrator.pool.verifiers] == [ours.address]
    assert list((await said(await cloud.client(edge), PROMPT)).tokens) == plain(TARGET, PROMPT, 10)


async def test_an_edge_chooses_by_the_round_trip(cloud: Cloud) -> None:
    """Whoever dials the far one does so through a relay, 40 ms away."""
    await cloud.tell()
    near, listen = await cloud.verifier(), free_address()
    relay = Relay(listen, delay=0.02)
    await cloud.owned.enter_async_context(relay.relaying())
    where = RegistryOptions(cloud.registry().url, advertise=relay.address)
    far = await verify_service.server.start(ModelServiceOptions(SLOW_TARGET, listen=listen), registration=where)
    cloud.owned.push_async_callback(far.stop, 0.0)
    edge = await cloud.edge()
    await until(verifiers_up(edge, 2))
    client, pool = await cloud.client(edge), edge.orchestrator.pool
    done = [await said(client, (*PROMPT, number), length=3) for number in range(6)]
    assert {pool.affinity.of(each.session_id) for each in done} == {near.address}
    assert pool.placed[Reason.NEAR] == 6


async def test_a_drafter_finds_the_orchestrators_that_let_it_dial_in(cloud: Cloud) -> None:
    await cloud.tell()
    await cloud.verifier(patient=True)
    refusing = await cloud.orchestrator()
    first = await cloud.orchestrator(accept_drafters=True)
    drafter = await cloud.dialling()
    assert drafter.address == first.address
    second = await cloud.orchestrator(accept_drafters=True)
    await until(lambda: sum(each.up for each in second.orchestrator.pool.drafters) == 1)
    assert not refusing.orchestrator.pool.drafters
    done = await said(await cloud.client(second), PROMPT, length=60)
    assert list(done.tokens) == plain(TARGET, PROMPT, 60)
    await first.stop(0.0)
    await until(lambda: drafter.address == second.address)
    done = await said(await cloud.client(second), PROMPT, length=60)
    assert list(done.tokens) == plain(TARGET, PROMPT, 60)
