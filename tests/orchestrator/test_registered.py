"""Whole stacks in one process whose parts find each other in a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any

import grpc
import pytest

import draft_service.server
import verify_service.server
from deploy.cli.services import registry
from deploy.cli.services.registry import RegistryServiceOptions, RunningRegistry
from draft_service.dialler import DiallingDrafter
from orchestrator.peers.discovery import RegistryFeed
from orchestrator.peers.peer import VerifierPeer
from orchestrator.server import RunningOrchestrator
from specwire.client import AsyncClient, Chunk, Completion, Finished, SpecwireError
from specwire.client.requests import RequestOptions
from specwire.core.messages import FinishReason
from specwire.core.placement import Reason
from specwire.registry.directory import Directory
from specwire.registry.entry import Load
from specwire.registry.options import CloudOptions, RegistryOptions
from specwire.rpc.server_options import ModelServiceOptions
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.stack import DRAFT, SLOW_TARGET, TARGET, TURNS, Services, drafted, plain
from tests.ports import free_address
from tests.rpc.relay import Relay
from tests.wait import asked, until
from verify_service.server import RunningVerifier

PROMPT = tuple(index % 50 + 3 for index in range(30))
MORE = (4, 5, 6)
# The same text by other weights, as their fingerprints say.
OTHER_WEIGHTS = f"{SLOW_TARGET}:agree=0.999999"
# Another version, by its weights or by what ends its texts.
VERSIONS = (OTHER_WEIGHTS, f"{SLOW_TARGET}:end=9")
LIMIT_S = 120.0


@pytest.fixture
async def place(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Services]:
    monkeypatch.setattr("orchestrator.peers.discovery.LOOK_S", 0.1)
    server.mend()
    async with AsyncExitStack() as parts:
        yield Services(parts, server)


def peer_of(running: RunningOrchestrator, verifier: RunningVerifier) -> VerifierPeer:
    found = (each for each in running.orchestrator.pool.verifiers if each.link.address == verifier.address)
    return next(found)


def verifiers_up(running: RunningOrchestrator, count: int) -> Callable[[], bool]:
    return lambda: sum(each.up for each in running.orchestrator.pool.verifiers) == count


def feed_of(running: RunningOrchestrator) -> RegistryFeed:
    assert running.orchestrator.pool.feed is not None
    return running.orchestrator.pool.feed


async def said(client: AsyncClient, prompt: tuple[int, ...], parent: str = "", length: int = 10) -> Completion:
    return await client.complete(prompt, max_tokens=length, ignore_eos=True, parent=parent)


async def test_a_turn_finds_its_parent_s_cache_from_another_orchestrator(place: Services, server: RedisServer) -> None:
    one, other = await place.verifier(), await place.verifier()
    here, there = [await place.orchestrator(redis_url=server.url) for _ in range(2)]
    await until(verifiers_up(here, 2))
    await until(verifiers_up(there, 2))
    await until(lambda: all(len(feed_of(each).orchestrators) == 2 for each in (here, there)))
    parents = [await said(await place.client(here), (*PROMPT, number)) for number in range(4)]
    homes = [here.orchestrator.pool.affinity.of(parent.session_id) for parent in parents]
    await until(lambda: not here.orchestrator.pool.affinity.fresh)
    client = await place.client(there)
    for parent, home in zip(parents, homes, strict=True):
        turn = await said(client, MORE, parent.session_id)
        assert there.orchestrator.pool.affinity.of(turn.session_id) == home
        assert turn.stats.cached_tokens >= 40
    assert set(homes) <= {one.address, other.address}
    assert there.orchestrator.pool.placed[Reason.HOLDER] == 4


async def test_a_session_is_taken_over_where_its_cache_is(place: Services, server: RedisServer) -> None:
    verifiers = [await place.verifier() for _ in range(3)]
    here, there = [await place.orchestrator(redis_url=server.url) for _ in range(2)]
    await until(verifiers_up(here, 3))
    await until(verifiers_up(there, 3))
    client = await place.owned.enter_async_context(AsyncClient([here.address, there.address]))
    events = client.generate(PROMPT, max_tokens=200, ignore_eos=True)
    tokens: list[int] = []
    session_id = ""
    async with aclosing(events):
        async for event in events:
            tokens += event.tokens if isinstance(event, Chunk) else ()
            if len(tokens) > 20 and here.orchestrator.sessions:
                await until(lambda: not here.orchestrator.pool.affinity.fresh)
                (session_id,) = here.orchestrator.sessions
                await here.stop(0.0)
            if isinstance(event, Finished):
                assert event.stats.cached_tokens >= 0
    assert tokens == plain(TARGET, PROMPT, 200)
    homes = [each.orchestrator.pool.affinity.of(session_id) for each in (here, there)]
    assert homes[0] == homes[1]
    assert homes[0] in {each.address for each in verifiers}


async def test_what_is_known_serves_on_while_the_registry_is_away(place: Services, server: RedisServer) -> None:
    await place.verifier(patient=True)
    await place.drafter()
    running = await place.orchestrator(plan=TURNS)
    client, feed = await place.client(running), feed_of(running)
    await until(lambda: bool(running.orchestrator.pool.drafters))
    server.stop()
    try:
        await until(lambda: "does not answer" in feed.trouble)
        await feed.learn_home("a session of another's")  # costs nobody its turn
        done = await drafted(lambda: said(client, PROMPT, length=60))
        assert list(done.tokens) == plain(TARGET, PROMPT, 60)
    finally:
        server.start()
    await until(lambda: not feed.trouble and feed.services.total() == 3)
    assert list((await said(client, PROMPT)).tokens) == plain(TARGET, PROMPT, 10)


async def test_an_orchestrator_may_be_there_before_everybody_else(place: Services) -> None:
    running = await place.orchestrator(start_timeout=0.2)
    assert running.orchestrator.unready == "no verifier is there"
    await place.verifier(TARGET)
    await until(verifiers_up(running, 1))
    assert running.orchestrator.unready is None
    assert list((await said(await place.client(running), PROMPT)).tokens) == plain(TARGET, PROMPT, 10)


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_new_version_takes_over_without_a_failed_request(place: Services, version: str) -> None:
    """A session stays with the one that it was begun with; new ones get the new; the old ones drain."""
    old = await place.verifier()
    running = await place.orchestrator()
    client = await place.client(running)
    await until(verifiers_up(running, 1))
    long = asyncio.create_task(said(client, PROMPT, length=400))
    await until(lambda: len(running.orchestrator.sessions) == 1)
    new = await place.verifier(version)
    await until(verifiers_up(running, 2))
    assert [each.model for each in (await client.server_info()).targets] == ["scripted:7"]
    turns = [await said(client, PROMPT) for _ in range(3)]
    homes = running.orchestrator.pool.affinity
    assert {homes.of(turn.session_id) for turn in turns} == {new.address}
    stopping = asyncio.create_task(old.stop(LIMIT_S))
    await until(lambda: not peer_of(running, old).takes_sessions)
    turns.append(await said(client, PROMPT))
    assert list((await long).tokens) == plain(TARGET, PROMPT, 400)
    await stopping
    assert homes.of((await long).session_id) == old.address
    turns.append(await said(client, PROMPT))
    assert all(list(turn.tokens) == plain(TARGET, PROMPT, 10) for turn in turns)


async def test_a_session_without_a_free_drafter_decodes_plainly(place: Services) -> None:
    """One drafter for two verifiers, with room for one session."""
    for _ in range(2):
        await place.verifier(patient=True)
    drafter = await place.drafter(slots=1)
    running = await place.orchestrator(plan=TURNS)
    await until(verifiers_up(running, 2))
    await until(lambda: any(each.up for each in running.orchestrator.pool.drafters))
    client = await place.client(running)
    wish = RequestOptions(max_tokens=120, ignore_eos=True, ngram=False)

    async def beside() -> list[Completion]:
        return list(await asyncio.gather(*(client.complete((*PROMPT, number), **wish) for number in range(2))))

    # The other one is refused while the first has its place.
    done = await asked(lambda: drafted(beside), lambda _: running.orchestrator.totals.stats.drafter_refusals)
    assert [list(each.tokens) for each in done] == [plain(TARGET, (*PROMPT, number), 120) for number in range(2)]
    assert [each.link.address for each in running.orchestrator.pool.drafters] == [drafter.address]


async def test_who_waits_for_a_slot_moves_to_a_verifier_that_comes(place: Services) -> None:
    first = await place.verifier(slots=1)
    running = await place.orchestrator()
    client = await place.client(running)
    await until(verifiers_up(running, 1))
    served = asyncio.create_task(said(client, PROMPT, length=400))
    await until(lambda: len(running.orchestrator.sessions) == 1)
    queued = [asyncio.create_task(said(client, (*PROMPT, number), length=20)) for number in range(2)]
    await until(lambda: len(peer_of(running, first).subjects) == 3)
    second = await place.verifier()
    done = [await session for session in queued]
    assert not served.done()
    assert {running.orchestrator.pool.affinity.of(each.session_id) for each in done} == {second.address}
    assert [list(each.tokens) for each in done] == [plain(TARGET, (*PROMPT, number), 20) for number in range(2)]
    assert list((await served).tokens) == plain(TARGET, PROMPT, 400)
    assert running.orchestrator.pool.affinity.of((await served).session_id) == first.address


async def test_who_can_be_decided_nowhere_else_comes_in_while_a_verifier_says_that_it_stops(
    place: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = await place.verifier()
    said_so, drain = asyncio.Event(), only._servicer.drain

    async def held(grace: float) -> None:
        await said_so.wait()  # however slow this machine is
        await drain(grace)

    monkeypatch.setattr(only._servicer, "drain", held)
    running = await place.orchestrator()
    client = await place.client(running)
    await until(verifiers_up(running, 1))
    long = asyncio.create_task(said(client, PROMPT, length=3500))  # it outlasts the test
    await until(lambda: bool(peer_of(running, only).subjects))
    stopping = asyncio.create_task(only.stop(LIMIT_S))
    await until(lambda: peer_of(running, only).report.draining)
    assert not peer_of(running, only).draining
    assert list((await said(client, (*PROMPT, 4))).tokens) == plain(TARGET, (*PROMPT, 4), 10)
    assert not long.done()
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)
    said_so.set()
    await stopping


async def test_a_verifier_serves_who_waits_before_it_stops(place: Services) -> None:
    only = await place.verifier(slots=1)
    running = await place.orchestrator()
    client = await place.client(running)
    await until(verifiers_up(running, 1))
    sessions = [asyncio.create_task(said(client, (*PROMPT, number), length=60)) for number in range(4)]
    await until(lambda: len(peer_of(running, only).subjects) == 4)
    await only.stop(LIMIT_S)
    done = [await session for session in sessions]
    assert [list(each.tokens) for each in done] == [plain(TARGET, (*PROMPT, number), 60) for number in range(4)]


async def test_a_full_cluster_queues_under_deadlines(place: Services) -> None:
    """Whoever has time enough is served by whichever slot comes free; who has not is told so, and disturbs nobody."""
    for _ in range(2):
        await place.verifier(slots=1)
    running = await place.orchestrator()
    client = await place.client(running)
    await until(verifiers_up(running, 2))
    served = [asyncio.create_task(said(client, (*PROMPT, number), length=200)) for number in range(2)]
    await until(lambda: sum(len(each.subjects) for each in running.orchestrator.pool.verifiers) == 2)
    queued = [asyncio.create_task(said(client, (*PROMPT, number), length=20)) for number in range(2, 6)]
    hasty = asyncio.create_task(client.complete(PROMPT, max_tokens=20, ignore_eos=True, timeout=0.3))
    done = [await session for session in (*served, *queued)]
    lengths = [200, 200, 20, 20, 20, 20]
    for number, (each, length) in enumerate(zip(done, lengths, strict=True)):
        assert list(each.tokens) == plain(TARGET, (*PROMPT, number), length)
    (told,) = await asyncio.gather(hasty, return_exceptions=True)
    if isinstance(told, Completion):
        assert (told.finish_reason, told.tokens) == (FinishReason.DEADLINE, ())
    else:
        assert isinstance(told, SpecwireError)
        assert told.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_verifier_says_who_waits(place: Services, server: RedisServer) -> None:
    verifier = await place.verifier(slots=1)
    running = await place.orchestrator()
    client = await place.client(running)
    await until(verifiers_up(running, 1))
    sessions = [asyncio.create_task(said(client, (*PROMPT, number), length=800)) for number in range(2)]
    directory = Directory.at(server.url)
    loads: dict[str, Load] = {}
    try:
        async with asyncio.timeout(LIMIT_S):
            while not (loads and loads[verifier.address].queue_s > 0):
                await asyncio.sleep(0.1)
                loads = {entry.address: entry.load for entry in (await directory.listing()).entries}
    finally:
        await directory.close()
        for session in sessions:
            session.cancel()
        await asyncio.gather(*sessions, return_exceptions=True)
    assert (loads[verifier.address].running, loads[verifier.address].waiting) == (1, 1)


# ----------------------------------------------------------------------------------------------------------------------
# Edges and drafters elsewhere, which find their peers by a RegistryService in front of a real Redis.


OTHER_MODEL = "scripted:8:vocab=64:delay_ms=5"


class Cloud(Services):
    """With a RegistryService; edges know its address only."""

    address = ""

    async def tell(self) -> RunningRegistry:
        running = await registry.start(RegistryServiceOptions(self.registry().url, self.address))
        self.owned.push_async_callback(running.stop, 0.0)
        return running

    async def edge(self, *models: str, **more: Any) -> RunningOrchestrator:
        cloud = CloudOptions(self.address, models)
        return await self.orchestrator(cloud=cloud, registration=RegistryOptions(), **more)

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
