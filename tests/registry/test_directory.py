"""The registry in real Redises: who is there, who has gone, what is believed, and what happens while Redis is away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot

from bench.harness.certificates import Authority
from specwire.redis import ONLY_NODE, RedisConnection, connection_of
from specwire.registry.directory import (
    AFFINITY,
    FIELD,
    INDEX,
    PREFIX,
    Directory,
    Registrar,
    RegistryUnavailable,
    new_id,
)
from specwire.registry.entry import MOST_BYTES, Load, Role, ServiceEntry, ServiceState, encode
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.redis_groups import SLOTS, client_of, cluster, cluster_url
from tests.orchestrator.redis_tls import encrypted, url_of
from tests.wait import LIMIT_S, raised, until

LONG_S = 600.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
def raw(server: RedisServer) -> Iterator[redis.Redis]:
    server.mend()
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        client.flushall()
        yield client


@pytest.fixture
async def directory(server: RedisServer, raw: redis.Redis) -> AsyncIterator[Directory]:
    opened = Directory.at(server.url, 30.0)
    yield opened
    await opened.close()


def entry(**values: object) -> ServiceEntry:
    return replace(ServiceEntry(new_id(), Role.VERIFIER, "127.0.0.1:1"), **values)  # type: ignore[arg-type]  # of a test


async def listed(directory: Directory) -> set[ServiceEntry]:
    return set((await directory.listing()).entries)


async def test_who_is_put_is_there_and_who_is_removed_is_not(directory: Directory) -> None:
    assert await listed(directory) == set()
    one, other = entry(), entry(role=Role.DRAFTER, address="127.0.0.1:2")
    await directory.put(one, LONG_S)
    await directory.put(other, LONG_S)
    assert await listed(directory) == {one, other}
    busy = replace(one, load=Load(1, 2, 3), beat=2)
    await directory.put(busy, LONG_S)
    assert await listed(directory) == {busy, other}
    await directory.remove(one.id)
    await directory.remove(one.id)
    assert await listed(directory) == {other}


async def test_who_is_silent_expires(directory: Directory, raw: redis.Redis) -> None:
    short, long = entry(), entry()
    await directory.put(short, 0.05)
    await directory.put(long, LONG_S)

    async def only_the_long_one() -> bool:
        return await listed(directory) == {long}

    async def the_index_too() -> bool:
        """What is put in takes out of it what expired: by a later instant than the key's own."""
        await directory.put(long, LONG_S)
        return raw.zrange(INDEX, 0, -1) == [long.id.encode()]

    await until(only_the_long_one)
    await until(the_index_too)


async def test_no_key_is_kept_for_ever(directory: Directory, raw: redis.Redis) -> None:
    one = entry()
    await directory.put(one, LONG_S)
    await directory.put(entry(), 1.0)
    await directory.note_affinity({"a-session": "127.0.0.1:1"})
    keys = {str(key): raw.pttl(key) for key in raw.keys("*")}
    assert len(keys) == 4
    assert all(ttl > 0 for ttl in keys.values()), keys
    assert raw.pttl(INDEX) > (LONG_S - 60) * 1000  # the shortest one does not cut it


async def test_what_is_no_entry_is_ignored_and_counted(directory: Directory, raw: redis.Redis) -> None:
    good, newer, huge, other, gone = (entry() for _ in range(5))
    for each in (good, newer, huge, other, gone):
        await directory.put(each, LONG_S)
    raw.set(PREFIX + newer.id, json.dumps({**json.loads(encode(newer)), "v": 2}))
    raw.set(PREFIX + huge.id, encode(huge) + b" " * MOST_BYTES)
    raw.delete(PREFIX + other.id, PREFIX + gone.id)
    raw.lpush(PREFIX + other.id, "a list")
    raw.zadd(INDEX, {"../../session": 1e15})
    found = await directory.listing()
    assert found.entries == (good,)
    assert found.ignored == {"newer": 1, "invalid": 3}


async def test_an_index_that_is_none_is_an_error(directory: Directory, raw: redis.Redis) -> None:
    raw.set(INDEX, "no set")
    await raised(RegistryUnavailable, directory.listing(), "the registry refused: ")


async def test_where_a_session_was_decided_is_remembered(directory: Directory, raw: redis.Redis) -> None:
    await directory.note_affinity({"one": "127.0.0.1:1", "two": "127.0.0.1:2"})
    assert [await directory.affinity_of(each) for each in ("one", "two", "three")] == [
        "127.0.0.1:1",
        "127.0.0.1:2",
        None,
    ]
    raw.set(AFFINITY + "one", "nonsense")
    assert await directory.affinity_of("one") is None


async def test_a_redis_that_is_away_is_told_and_found_again(directory: Directory, server: RedisServer) -> None:
    one = entry()
    await directory.put(one, LONG_S)
    server.stop()
    await raised(RegistryUnavailable, directory.listing(), "the registry does not answer: ")
    server.start()
    assert await listed(directory) == set()
    await directory.put(one, LONG_S)
    server.stop()
    server.start()
    assert await listed(directory) == set()  # over a connection that broke unseen
    server.pause()
    hasty = Directory.at(server.url, 0.5)
    await raised(RegistryUnavailable, hasty.put(one, LONG_S), "does not answer")
    await hasty.close()
    server.resume()
    await directory.put(one, LONG_S)
    assert await listed(directory) == {one}


async def until_served(directory: Directory) -> ServiceEntry:
    """Until a service is listed, and all that are listed serve."""
    found: set[ServiceEntry] = set()

    async def all_serve() -> bool:
        found.clear()
        found.update(await listed(directory))
        return {each.state for each in found} == {ServiceState.SERVING}

    await until(all_serve)
    return found.pop()


def registrar(server: RedisServer, known: ServiceEntry) -> Registrar:
    return Registrar(Directory.at(server.url, 0.5), lambda: known, 0.02, LONG_S)


async def test_a_service_that_lives_is_there_until_it_stops(directory: Directory, server: RedisServer) -> None:
    known = registrar(server, entry())
    known.start()
    first = await until_served(directory)

    async def three_beats_later() -> bool:
        return next(iter(await listed(directory))).beat >= first.beat + 3

    await until(three_beats_later)
    await known.drain()
    assert {each.state for each in await listed(directory)} == {ServiceState.DRAINING}  # at once
    await asyncio.sleep(0.1)
    assert {each.state for each in await listed(directory)} == {ServiceState.DRAINING}  # and for good
    await known.close()
    await known.close()
    assert await listed(directory) == set()


async def test_a_service_outlives_its_registry(directory: Directory, server: RedisServer) -> None:
    known = registrar(server, entry())
    server.stop()
    known.start()
    await asyncio.sleep(0.1)
    server.start()
    await until_served(directory)
    server.stop()
    server.start()
    await until_served(directory)
    server.pause()
    async with asyncio.timeout(LIMIT_S):
        await known.drain()
        await known.close()


async def test_where_there_is_no_registry_nothing_is_said() -> None:
    known = Registrar(None, entry)
    known.start()
    await known.drain()
    await known.close()


def test_ids_are_no_guess() -> None:
    assert len({new_id() for _ in range(100)}) == 100


# In a cluster, and where it is encrypted


async def test_services_are_found_wherever_their_keys_are() -> None:
    with cluster() as nodes:
        directory = Directory.at(cluster_url(nodes), 2.0)
        entries = {entry(address=f"10.0.0.1:{port}") for port in range(1, 21)}
        for each in entries:
            await directory.put(each, LONG_S)
        assert set((await directory.listing()).entries) == entries
        await directory.note_affinity({str(number): "10.0.0.1:1" for number in range(20)})
        assert {await directory.affinity_of(str(number)) for number in range(20)} == {"10.0.0.1:1"}
        for node in nodes:
            with client_of(node) as client:
                keys = client.keys(f"{PREFIX}*")
                assert 0 < len(keys) < 20
                assert all(client.pttl(key) > 0 for key in client.keys("*"))

        lost = next(node for node in nodes if not holds_index(nodes.index(node)))
        lost.stop()
        with pytest.raises(RegistryUnavailable, match="does not answer"):
            await directory.listing()  # a part of the truth would look like services that have gone
        lost.start()
        await until(lambda: there(directory, entries))
        await directory.close()


def holds_index(node: int) -> bool:
    """The first node has the first half of the slots."""
    return (key_slot(INDEX.encode()) < SLOTS // 2) == (node == 0)


async def there(directory: Directory, entries: set[ServiceEntry]) -> bool:
    """Once the server is back, whoever it has lost says again that it is there."""
    try:
        for each in entries:
            await directory.put(each, LONG_S)
        return set((await directory.listing()).entries) == entries
    except RegistryUnavailable:
        return False


async def test_who_shows_a_certificate_is_let_in(tmp_path: Path) -> None:
    ours, stranger = Authority(), Authority("stranger")
    one = entry()
    with RedisServer() as server, encrypted(server, ours, tmp_path, mutual=True) as address:
        directory = Directory.at(url_of(address, ours, tmp_path, shown=ours), 5.0)
        await directory.put(one, LONG_S)
        assert (await directory.listing()).entries == (one,)
        await directory.close()
        for shown in (None, stranger):
            lacking = Directory.at(url_of(address, ours, tmp_path, shown=shown), 5.0)
            await raised(RegistryUnavailable, lacking.listing())
            await lacking.close()


# A question to Redis that is given up ends, at whatever moment: a service that stops waits for its heartbeat's end

# Turns of the loop before it is given up: more than a question takes.
TURNS = range(1, 20)
# More than are asked before it is given up; then it would end by itself.
QUESTIONS = 100


@pytest.fixture
async def connection(server: RedisServer, raw: redis.Redis) -> AsyncIterator[RedisConnection]:
    opened = connection_of(server.url, 5.0, FIELD)
    await opened.send(ONLY_NODE, [("PING",)])
    yield opened
    await opened.close()


async def ask_on(connection: RedisConnection) -> None:
    for _ in range(QUESTIONS):
        await connection.send(ONLY_NODE, [("PING",)])


@pytest.mark.parametrize("turns", TURNS)
async def test_who_asks_again_and_again_can_be_stopped(connection: RedisConnection, turns: int) -> None:
    asking = asyncio.create_task(ask_on(connection))
    for _ in range(turns):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled()


@pytest.mark.parametrize("turns", TURNS)
async def test_a_time_limit_holds(connection: RedisConnection, turns: int) -> None:
    """It cancels as well, and is a TimeoutError to who has set it."""
    limit = asyncio.timeout(None)

    async def ask() -> None:
        async with limit:
            await ask_on(connection)

    asking = asyncio.create_task(ask())
    for _ in range(turns):
        await asyncio.sleep(0)
    limit.reschedule(0.0)
    await asyncio.wait({asking})
    assert isinstance(asking.exception(), TimeoutError)
