"""The registry over gRPC: what callers are told, and what one who follows it believes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

import specwire.registry.service
from deploy.cli.services import registry
from deploy.cli.services.registry import RegistryServiceOptions, RunningRegistry
from specwire.core.invalid import InvalidParameter
from specwire.registry.directory import Directory, RegistryUnavailable, new_id
from specwire.registry.entry import Load, Role, ServedModel, ServiceEntry, ServiceState
from specwire.registry.options import CloudOptions
from specwire.registry.service import RemoteDirectory, Wanted, service_from_wire, service_to_wire
from specwire.rpc.channel import open_channel
from specwire.rpc.keys import read_keys
from specwire.v1 import registry_pb2, registry_pb2_grpc
from tests.integration.stack_process import running
from tests.orchestrator.redis_for_tests import RedisServer
from tests.ports import free_address
from tests.wait import LIMIT_S, raised, until

LONG_S = 600.0
MODEL = ServedModel("llama", "aa", "bb", "cc")


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often; tell loads at once."""
    for name, seconds in (("LOOK_S", 0.05), ("LOAD_EVERY_S", 0.05), ("MOST_BACKOFF_S", 0.2)):
        monkeypatch.setattr(specwire.registry.service, name, seconds)


@pytest.fixture
async def directory(redis: RedisServer) -> AsyncIterator[Directory]:
    redis.mend()
    opened = Directory.at(redis.url, 30.0)
    for each in (await opened.listing()).entries:
        await opened.remove(each.id)
    yield opened
    await opened.close()


@asynccontextmanager
async def served(redis: RedisServer, listen: str = "127.0.0.1:0", keys: Path | None = None) -> AsyncIterator[str]:
    options = RegistryServiceOptions(
        redis.url, listen, keys=read_keys("--api-keys", None if keys is None else str(keys))
    )
    service: RunningRegistry = await registry.start(options)
    try:
        yield service.address
    finally:
        await service.stop(0.0)


@asynccontextmanager
async def following(address: str, token: str = "") -> AsyncIterator[RemoteDirectory]:
    remote = RemoteDirectory(CloudOptions(address), Role.VERIFIER, None, token)
    try:
        yield remote
    finally:
        await remote.close()


def verifier(number: int = 1, **values: object) -> ServiceEntry:
    entry = ServiceEntry(new_id(), Role.VERIFIER, f"10.0.0.{number}:50061", models=(MODEL,), slots=4)
    return replace(entry, **values)  # type: ignore[arg-type]  # of a test


async def told(remote: RemoteDirectory) -> dict[str, ServiceEntry]:
    return {each.address: each for each in (await remote.listing()).entries}


async def hears(remote: RemoteDirectory, wanted: Callable[[dict[str, ServiceEntry]], bool]) -> None:
    """Return once it is told so; while it is told nothing it is not."""

    async def told_so() -> bool:
        try:
            return wanted(await told(remote))
        except RegistryUnavailable:
            return False

    await until(told_so)


async def test_who_follows_hears_who_comes_drains_and_goes(redis: RedisServer, directory: Directory) -> None:
    one, other = verifier(1, region="eu", load=Load(1, 2, 3)), verifier(2)
    await directory.put(one, LONG_S)
    await directory.put(replace(one, id=new_id(), role=Role.DRAFTER), LONG_S)
    async with served(redis) as address, following(address) as remote:
        found = await told(remote)
        assert found == {one.address: replace(one, beat=found[one.address].beat)}
        await directory.put(other, LONG_S)
        await hears(remote, lambda heard: heard.keys() == {one.address, other.address})
        await directory.put(replace(one, state=ServiceState.DRAINING), LONG_S)
        await hears(remote, lambda heard: heard[one.address].state is ServiceState.DRAINING)
        await directory.put(replace(other, load=Load(4, 9, 0)), LONG_S)
        await hears(remote, lambda heard: heard[other.address].load == Load(4, 9, 0))
        await directory.remove(one.id)
        await hears(remote, lambda heard: heard.keys() == {other.address})


async def test_each_look_is_a_heartbeat_while_the_stream_is_up(redis: RedisServer, directory: Directory) -> None:
    await directory.put(verifier(), LONG_S)
    async with served(redis) as address, following(address) as remote:
        beats = [next(iter((await told(remote)).values())).beat for _ in range(3)]
        assert beats == sorted(set(beats))


async def test_what_was_told_is_not_taken_back_while_redis_is_away(redis: RedisServer, directory: Directory) -> None:
    await directory.put(verifier(), LONG_S)
    async with served(redis) as address, following(address) as remote:
        assert len(await told(remote)) == 1
        redis.end()
        try:
            for _ in range(10):
                assert len(await told(remote)) == 1
                await asyncio.sleep(0.05)
            async with following(address) as late:  # the server still knows
                assert len(await told(late)) == 1
        finally:
            redis.start()


async def test_a_registry_that_never_answered_tells_nothing(redis: RedisServer) -> None:
    service = await registry.start(RegistryServiceOptions(f"redis://{free_address()}"))
    try:
        async with following(service.address) as remote:
            await raised(RegistryUnavailable, remote.listing(), "registry")
    finally:
        await service.stop(0.0)


async def test_who_follows_comes_back_to_a_server_that_was_away(redis: RedisServer, directory: Directory) -> None:
    await directory.put(verifier(), LONG_S)
    listen = free_address()
    async with AsyncExitStack() as parts:
        async with served(redis, listen) as address:
            remote = await parts.enter_async_context(following(address))
            assert len(await told(remote)) == 1

        async def away() -> bool:
            try:
                await remote.listing()
            except RegistryUnavailable as error:
                return listen in str(error)
            return False

        await until(away)
        await directory.put(verifier(2), LONG_S)
        async with served(redis, listen):
            await hears(remote, lambda heard: len(heard) == 2)


async def test_only_who_shows_a_key_is_told(redis: RedisServer, directory: Directory, tmp_path: Path) -> None:
    await directory.put(verifier(), LONG_S)
    keys = tmp_path / "keys"
    keys.write_text("edges 0123456789abcdef0123\n")
    keys.chmod(0o600)
    async with served(redis, keys=keys) as address:
        async with following(address) as stranger:
            await raised(RegistryUnavailable, stranger.listing(), "UNAUTHENTICATED")
        async with following(address, "0123456789abcdef0123") as edge:
            assert len(await told(edge)) == 1


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (registry_pb2.FollowRequest(), "role"),
        (registry_pb2.FollowRequest(role=7), "role"),  # type: ignore[arg-type]  # of a newer caller
        (registry_pb2.FollowRequest(role=registry_pb2.SERVICE_ROLE_VERIFIER, most=257), "most"),
        (registry_pb2.FollowRequest(role=registry_pb2.SERVICE_ROLE_VERIFIER, region="a b"), "region"),
        (registry_pb2.FollowRequest(role=registry_pb2.SERVICE_ROLE_VERIFIER, models=["x"] * 65), "models"),
        (registry_pb2.FollowRequest(role=registry_pb2.SERVICE_ROLE_VERIFIER, models=["x" * 256]), "models"),
        (registry_pb2.FollowRequest(role=registry_pb2.SERVICE_ROLE_VERIFIER, caller="x" * 65), "caller"),
    ],
)
async def test_bad_requests_name_the_field(
    redis: RedisServer, directory: Directory, request_: registry_pb2.FollowRequest, named: str
) -> None:
    async with served(redis) as address, open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in registry_pb2_grpc.RegistryServiceStub(channel).Follow(request_, timeout=LIMIT_S):
                pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(f"{named}: ")


async def test_too_many_callers_are_told_to_wait(
    redis: RedisServer, directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specwire.registry.service, "MOST_FOLLOWERS", 1)
    async with served(redis) as address, following(address) as one, following(address) as other:
        await one.listing()
        await raised(RegistryUnavailable, other.listing(), "RESOURCE_EXHAUSTED")


def test_many_callers_spread_over_a_large_pool_and_each_keeps_its_own() -> None:
    pool = [verifier(number) for number in range(64)]
    wanted = [Wanted(Role.VERIFIER, most=4, caller=str(number)) for number in range(400)]
    chosen = [{each.id for each in one.chosen(pool)} for one in wanted]
    assert all(len(each) == 4 for each in chosen)
    counts = Counter(each for one in chosen for each in one)
    assert len(counts) == 64
    assert max(counts.values()) < 3 * 400 * 4 / 64
    moved = [len(one - {each.id for each in w.chosen(pool[1:])}) for one, w in zip(chosen, wanted, strict=True)]
    assert sum(moved) == counts[pool[0].id]  # only those who had the one that went, and only that one


def test_of_a_region_of_a_model_and_what_drains_beside() -> None:
    here, there = verifier(1, region="eu"), verifier(2, region="us")
    leaving = verifier(3, region="us", state=ServiceState.DRAINING)
    other = verifier(4, models=(replace(MODEL, name="qwen"),))
    drafter = verifier(5, role=Role.DRAFTER)
    pool = [there, other, leaving, drafter, here]
    assert Wanted(Role.VERIFIER, "eu", most=1).chosen(pool) == [here, leaving]
    assert Wanted(Role.VERIFIER, models=frozenset({"qwen"})).chosen(pool) == [other]
    assert set(Wanted(Role.VERIFIER).chosen(pool)) - {leaving} == {here, there, other}


def test_an_entry_comes_back_as_it_went_but_for_its_heartbeat() -> None:
    entry = verifier(1, region="eu", kv_bytes=1 << 40, load=Load(1, 2, 3), state=ServiceState.DRAINING, started=5.5)
    assert service_from_wire(service_to_wire(replace(entry, beat=7)), Role.VERIFIER, 9) == replace(entry, beat=9)


class Liar(registry_pb2_grpc.RegistryServiceServicer):
    """Tells one service that is as it should be among many that are not."""

    async def Follow(
        self, request: registry_pb2.FollowRequest, context: object
    ) -> AsyncIterator[registry_pb2.FollowResponse]:
        good = service_to_wire(verifier())
        bad = [registry_pb2.RegisteredService() for _ in range(7)]
        for each in bad:
            each.CopyFrom(good)
        bad[0].address = "10.0.0.1:50061,evil:1"
        bad[1].id = "x"
        bad[2].region = "\n"
        bad[3].models[0].name = "\x1b[2J"
        bad[4].models[0].weights = "../../etc"
        bad[5].started = float("nan")
        bad[6].kv_bytes = (1 << 64) - 1
        yield registry_pb2.FollowResponse(services=[*bad, good])
        await asyncio.Event().wait()


async def test_what_is_told_is_checked() -> None:
    server = grpc.aio.server()
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(Liar(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with following(f"127.0.0.1:{port}") as remote:
            listing = await remote.listing()
    finally:
        await server.stop(0.0)
    assert [each.address for each in listing.entries] == ["10.0.0.1:50061"]
    assert listing.ignored == {"invalid": 7}


async def test_who_asks_what_is_no_registry_is_told_so(redis: RedisServer) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with following(f"127.0.0.1:{port}") as remote:
            await raised(RegistryUnavailable, remote.listing(), "is no registry")
    finally:
        await server.stop(0.0)


@pytest.mark.parametrize(
    ("values", "named"),
    [({"url": "ftp://x"}, "registry"), ({"listen": "x"}, "listen"), ({"listen": "0.0.0.0:0"}, "listen")],
)
def test_options_of_the_service_are_checked(redis: RedisServer, values: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{named}: "):
        RegistryServiceOptions(**{"url": redis.url, **values})  # type: ignore[arg-type]  # only strings here


@pytest.mark.parametrize(
    ("cloud", "named"),
    [(("nowhere", ()), "cloud"), (("", ("a",)), "cloud-model"), (("h:1", ("a" * 256,)), "cloud-model")],
)
def test_options_of_who_asks_are_checked(cloud: tuple[str, tuple[str, ...]], named: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{named}: "):
        CloudOptions(*cloud)


async def test_the_commands_ready_line(redis: RedisServer) -> None:
    with running("registry", "--registry", redis.url, "--json") as command:
        line = json.loads(await asyncio.to_thread(command.line))
        assert line["service"] == "registry"
        async with following(line["address"]) as remote:
            await remote.listing()
