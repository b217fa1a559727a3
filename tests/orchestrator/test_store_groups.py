"""The log behind Sentinels, in a cluster, over TLS, as an ACL user: real servers that fail over, move and die."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import pytest
from redis import Redis
from redis.crc import key_slot

from bench.harness.certificates import Authority
from orchestrator.store import AppendReply, Fenced, SessionStore, StoreUnavailable, open_store
from orchestrator.store.scripts import session_keys
from specwire.core.messages import Append, Outcome
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.redis_groups import (
    LIMIT_S,
    SERVICE,
    SLOTS,
    ask,
    ask_until,
    client_of,
    cluster,
    cluster_url,
    log_bytes,
    replica_in_cluster,
    replicated,
    replication,
    sentinel,
)
from tests.orchestrator.redis_tls import encrypted, url_of
from tests.orchestrator.test_store import log_of, record_of
from tests.wait import raised

A = Outcome.ACCEPTED
TTL = 600.0
Answer = TypeVar("Answer")


@asynccontextmanager
async def opened(url: str, timeout_s: float = 5.0, durability: str = "") -> AsyncIterator[SessionStore]:
    store = await open_store(url, timeout_s, durability)
    try:
        yield store
    finally:
        await store.close()


async def repeated(call: Callable[[], Awaitable[Answer]]) -> Answer:
    """As the appender does it: until the log answers."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                return await call()
            except StoreUnavailable:
                await asyncio.sleep(0.1)


async def test_sentinels_lead_to_the_primary_and_after_its_loss_to_the_next() -> None:
    with replicated() as (primary, replica), sentinel(primary) as address:
        async with opened(f"redis+sentinel://127.0.0.1:1,{address}/{SERVICE}/0") as store:
            fence = await store.create(record_of("s"), TTL)
            await store.append("s", fence, Append(3, (7,), (A,)))
            with client_of(primary) as client:
                client.set("last", "1")
                assert client.wait(1, int(LIMIT_S * 1000)) == 1
            primary.stop()
            await raised(StoreUnavailable, store.append("s", fence, Append(4, (8,), (A,))))
            assert await repeated(lambda: store.append("s", fence, Append(4, (8,), (A,)))) == AppendReply(5, False)
            assert replication(replica, "role") == "master"
            assert log_bytes(replica, "s") == 4 * 5


async def test_a_primary_that_became_a_replica_is_left() -> None:
    """It still answers, but takes no writes."""
    with replicated() as (primary, replica), sentinel(primary) as address:
        async with opened(f"redis+sentinel://{address}/{SERVICE}") as store:
            fence = await store.create(record_of("s"), TTL)
            with Redis(port=int(address.partition(":")[2])) as client:
                await asyncio.to_thread(ask_until, lambda: ask(client, "SENTINEL FAILOVER", SERVICE))
            await asyncio.to_thread(ask_until, lambda: replication(primary, "role") == "slave")
            assert await repeated(lambda: store.append("s", fence, Append(3, (7,), (A,)))) == AppendReply(4, False)
            assert replication(replica, "role") == "master"
            assert log_bytes(replica, "s") == 4 * 4


async def test_a_service_that_no_sentinel_knows_is_named() -> None:
    with replicated() as (primary, _), sentinel(primary) as address, pytest.raises(StoreUnavailable, match="other"):
        await open_store(f"redis+sentinel://:secret@{address}/other", 2.0)


async def test_of_two_claims_the_later_one_is_newer_on_a_replica_that_lacks_the_other() -> None:
    """A replica was promoted without the first claim. Both servers' clocks are two seconds behind the claimers'."""
    at_us = int(time.time() * 1e6) + 2_000_000
    with replicated() as (primary, replica):
        async with opened(primary.url) as log:
            fence = await log.create(record_of("s"), TTL, "first")
            await log.append("s", fence, Append(3, (7,), (A,)))
            await asyncio.to_thread(ask_until, lambda: log_bytes(replica, "s") == 4 * 4)
            with client_of(replica) as client:
                ask(client, "REPLICAOF", "NO", "ONE")
            lost = (await log.claim("s", "second", fence, at_us)).fence
            await log.append("s", lost, Append(4, (8, 9), (A, A)))
            primary.stop()
        async with opened(replica.url) as log:
            claimed = await log.claim("s", "third", fence, at_us + 1)
            assert (claimed.tokens, claimed.fence) == ((7,), lost + 1)
            await raised(Fenced, log.append("s", lost, Append(6, (1,), (A,))))


async def test_a_write_counts_when_replicas_have_it() -> None:
    with replicated() as (primary, replica):
        async with opened(primary.url, durability="redis-wait:1") as store:
            assert store.durability == "redis-wait:1"
            fence = await store.create(record_of("s"), TTL)
            await store.append("s", fence, Append(3, (7,), (A,)))
            assert log_bytes(replica, "s") == 4 * 4
            log = await log_of(store, "s")
            assert log.silent_s < TTL / 2
            assert await store.read("nobody") is None
            replica.pause()
            short = await raised(StoreUnavailable, store.append("s", fence, Append(4, (8,), (A,))), "0 of 1 replicas")
            assert not short.refused  # a replica that is gone for a moment ends no session
            await raised(StoreUnavailable, store.read("s"), "0 of 1 replicas")  # nor is it read, and shown to anybody
            replica.resume()
            assert await repeated(lambda: store.append("s", fence, Append(4, (8,), (A,)))) == AppendReply(5, False)
            assert log_bytes(replica, "s") == 4 * 5


async def test_a_write_counts_when_it_is_on_the_disk() -> None:
    with RedisServer(appendonly="yes", appendfsync="always") as server:
        async with opened(server.url, durability="redis-fsync") as store:
            assert store.durability == "redis-fsync"
            fence = await store.create(record_of("s"), TTL)
            await store.append("s", fence, Append(3, (7, 8), (A, A)))
            server.stop()
            server.start()
            assert await repeated(lambda: store.append("s", fence, Append(5, (9,), (A,)))) == AppendReply(6, False)
            server.stop()
            server.settings["appendfsync"] = "everysec"
            server.start()
            await raised(StoreUnavailable, store.append("s", fence, Append(6, (1,), (A,))))
            with pytest.raises(StoreUnavailable, match="redis-fsync needs .*; Redis has appendfsync everysec"):
                await store.append("s", fence, Append(6, (1,), (A,)))


async def test_a_redis_that_does_not_force_writes_to_its_disk_is_refused() -> None:
    with RedisServer() as server:
        with pytest.raises(StoreUnavailable, match="durability: redis-fsync needs .*Redis has appendonly no"):
            await open_store(server.url, durability="redis-fsync")
        with client_of(server) as client:
            client.acl_setuser("plain", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all", "-config"])
        url = f"unix://plain:secret@{server.socket}"
        refused = await raised(
            StoreUnavailable, open_store(url, durability="redis-fsync"), "redis-fsync cannot be checked.*permissions"
        )
        assert "secret" not in str(refused)


@pytest.mark.parametrize(
    ("url", "durability", "says"),
    [
        ("memory:", "redis", "durability: redis needs a Redis as redis-url"),
        ("redis://host", "memory", "durability: memory needs memory: as redis-url"),
        ("redis://host", "disk", "durability: must be one of memory, file, .*, redis-wait:N, not 'disk'"),
        ("redis://host", "file-fsync", "durability: file-fsync needs file:PATH as redis-url"),
        ("file:x", "redis-wait:1", "durability: redis-wait:1 needs a Redis as redis-url"),
        ("file:x", "memory", "durability: memory needs memory: as redis-url"),
        ("redis://host", "redis-wait", "durability: must be .*, not 'redis-wait'"),
        ("redis://host", "redis-fsync:1", "durability: must be .*, not 'redis-fsync:1'"),
        ("redis://host", "redis-wait:0", "durability: the N of redis-wait:N must be from 1 to 16, not '0'"),
        ("redis://host", "redis-wait:x", "durability: the N of redis-wait:N must be from 1 to 16, not 'x'"),
    ],
)
async def test_a_level_that_does_not_fit_is_refused(url: str, durability: str, says: str) -> None:
    await raised(StoreUnavailable, open_store(url, durability=durability), says)


async def test_an_acl_user_needs_no_more_than_the_scripts_do() -> None:
    with RedisServer() as server:
        kinds = ("scripting", "connection", "hash", "string", "sortedset", "keyspace")
        commands = [*(f"+@{kind}" for kind in kinds), "+time", "-@dangerous"]
        with client_of(server) as client:
            client.acl_setuser(
                "specwire", enabled=True, passwords=["+a b:/@?#"], keys=["specwire:*"], commands=commands
            )
            client.acl_setuser("default", enabled=False)
        secret = quote("a b:/@?#", safe="")
        async with opened(f"unix://specwire:{secret}@{server.socket}") as store:
            fence = await store.create(record_of("s"), TTL)
            await store.bind_request("t", "r", "s", TTL)
            await store.append("s", fence, Append(3, (7,), (A,)))
            await store.claim("s", "me")
            await store.call_roll("w", ["s"], TTL, TTL)
            assert await store.missed("w", TTL, 9) == []
            await store.strike("w", ["s"])
            await store.tail("s", 0)
            await store.delete("s")
        refused = await raised(
            StoreUnavailable, open_store(f"unix://specwire:wrong-secret@{server.socket}"), r"unix://specwire:\*\*\*@"
        )
        assert "wrong-secret" not in str(refused)


@pytest.mark.parametrize("mutual", [False, True])
async def test_tls_is_spoken_and_certificates_are_checked(tmp_path: Path, mutual: bool) -> None:
    """mutual: the Redis wants one, too."""
    authority, stranger = Authority(), Authority("stranger")
    with RedisServer() as server, encrypted(server, authority, tmp_path, mutual) as address:
        async with opened(url_of(address, authority, tmp_path, shown=authority if mutual else None)) as store:
            fence = await store.create(record_of("s"), TTL)
            assert await store.append("s", fence, Append(3, (7,), (A,))) == AppendReply(4, False)
        await raised(StoreUnavailable, open_store(url_of(address, stranger, tmp_path)), "certificate")
        lacking = url_of(address, authority, tmp_path), url_of(address, authority, tmp_path, shown=stranger)
        for url in (*(lacking if mutual else ()), f"redis://{address}/0"):
            await raised(StoreUnavailable, open_store(url))
        with client_of(server) as client:
            assert set(client.keys()) >= {key.encode() for key in session_keys("s")}


def sessions_of(server: int) -> list[str]:
    """Ids of sessions that lie at the first or the second of a cluster's servers."""
    half = SLOTS // 2
    names = (f"session{index}" for index in range(1000))
    return [name for name in names if key_slot(session_keys(name)[0].encode()) // half == server][:4]


async def test_a_clusters_replica_takes_over_with_what_was_acknowledged() -> None:
    with cluster() as nodes, replica_in_cluster(nodes) as replica:
        name = sessions_of(0)[0]
        async with opened(cluster_url(nodes), 2.0) as store:
            fence = await store.create(record_of(name), TTL)
            await store.append(name, fence, Append(3, (7,), (A,)))
            with client_of(nodes[0]) as client:
                client.set("{" + name + "}last", "1")
                assert client.wait(1, int(LIMIT_S * 1000)) == 1
            nodes[0].stop()
            await raised(StoreUnavailable, store.append(name, fence, Append(4, (8,), (A,))))
            with client_of(replica) as client:
                ask(client, "CLUSTER", "FAILOVER", "TAKEOVER")
            assert await repeated(lambda: store.append(name, fence, Append(4, (8,), (A,)))) == AppendReply(5, False)
        assert log_bytes(replica, name) == 4 * 5


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("how", ["killed", "silent"])
async def test_who_keeps_asking_a_lost_server_does_not_hold_up_the_others(lost: int, how: str) -> None:
    with cluster() as nodes:
        async with opened(cluster_url(nodes), 3.0) as store:
            here, there = sessions_of(1 - lost)[0], sessions_of(lost)[0]
            fences = {name: await store.create(record_of(name), TTL) for name in (here, there)}
            if how == "killed":
                nodes[lost].stop()
            else:
                nodes[lost].pause()
            asking = [asyncio.create_task(keep_asking(store, there, fences[there])) for _ in range(3)]
            for position in range(3, 30):
                assert (await store.append(here, fences[here], Append(position, (7,), (A,)))).length == position + 1
                await asyncio.sleep(0.05)
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            if how == "silent":
                nodes[lost].resume()


async def keep_asking(store: SessionStore, session_id: str, fence: int) -> None:
    await repeated(lambda: store.append(session_id, fence, Append(3, (7,), (A,))))


async def test_a_session_is_found_where_its_slot_has_moved_to() -> None:
    with cluster() as nodes, client_of(nodes[0]) as first, client_of(nodes[1]) as second:
        name = sessions_of(0)[0]
        async with opened(cluster_url(nodes)) as store:
            fence = await store.create(record_of(name), TTL)
            await store.append(name, fence, Append(3, (7,), (A,)))
            move(name, first, second, nodes[1])
            assert await repeated(lambda: store.append(name, fence, Append(4, (8,), (A,)))) == AppendReply(5, False)
            assert await repeated(lambda: store.append(name, fence, Append(5, (9,), (A,)))) == AppendReply(6, False)
        assert log_bytes(nodes[1], name) == 4 * 6


def move(session_id: str, source: Redis, target: Redis, target_server: RedisServer) -> None:
    """Hand the session's slot over, keys and all."""
    keys = session_keys(session_id)
    slot = key_slot(keys[0].encode())
    here = ask(source, "CLUSTER MYID").decode()
    there = ask(target, "CLUSTER MYID").decode()
    ask(target, "CLUSTER SETSLOT", slot, "IMPORTING", here)
    ask(source, "CLUSTER SETSLOT", slot, "MIGRATING", there)
    host, _, port = target_server.tcp.partition(":")
    ask(source, "MIGRATE", host, port, "", 0, 10_000, "KEYS", *keys)
    for client in (target, source):
        ask(client, "CLUSTER SETSLOT", slot, "NODE", there)
