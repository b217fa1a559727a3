"""What only the Redis log can get wrong: scripts flushed, servers gone or silent, keys without an end, batching."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from orchestrator.session.appender import Appender, Lifetimes
from orchestrator.store import (
    AppendReply,
    DamagedLog,
    DeletedSession,
    Fenced,
    Gap,
    MissingSession,
    SessionStore,
    StaleLog,
    StoredSession,
    StoreUnavailable,
    open_store,
)
from orchestrator.store.base import UnfitStore, unavailable
from orchestrator.store.encoding import encode_record
from orchestrator.store.redis import MOST_AT_ONCE, RedisStore
from orchestrator.store.scripts import READ_SETTLED, TAIL_SETTLED, request_key, roll_key, session_keys
from specwire.core.law.sampling import Sampling
from specwire.core.messages import Append, End, FinishReason, Outcome, TokenLogprobs
from specwire.redis import Command, Node, without_password
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.test_appender import Output
from tests.orchestrator.test_store import log_of, record_of
from tests.orchestrator.test_store_groups import repeated
from tests.wait import LIMIT_S, eventually, raised, until

A = Outcome.ACCEPTED
TTL = 60.0
# Of a store that is waited for, and of one of which a test waits until it gives up.
TIMEOUT, SOON = 30.0, 1.0


@pytest.fixture
async def store(redis: RedisServer) -> AsyncIterator[SessionStore]:
    opened = await open_store(redis.url, timeout_s=TIMEOUT)
    yield opened
    await opened.close()


@pytest.fixture
async def hasty(redis: RedisServer) -> AsyncIterator[SessionStore]:
    opened = await repeated(lambda: open_store(redis.url, timeout_s=SOON))
    yield opened
    await opened.close()


@pytest.fixture
def raw(redis: RedisServer) -> Iterator[Redis]:
    client = Redis(unix_socket_path=str(redis.socket))
    yield client
    client.close()


Fault = Callable[[Redis], AbstractContextManager[str]]


@contextmanager
def unwritable(raw: Redis) -> Iterator[str]:
    """A snapshot cannot be written, as on a full disk."""

    def save(ended: str) -> None:
        raw.bgsave()
        assert eventually(lambda: raw.info("persistence")["rdb_last_bgsave_status"] == ended)

    raw.config_set("dbfilename", ".")
    save("err")
    yield "Redis cannot save to its disk, which may be full"
    raw.config_set("dbfilename", "dump.rdb")
    save("ok")


@contextmanager
def replica(raw: Redis) -> Iterator[str]:
    raw.replicaof("127.0.0.1", "1")
    yield "the server is a read-only replica"
    raw.replicaof("NO", "ONE")


async def test_every_key_has_an_end_renewed_by_every_write(store: SessionStore, raw: Redis) -> None:
    keys = session_keys("s")
    fence = await store.create(record_of("s"), TTL)
    await store.append("s", fence, Append(3, (7,), (A,)))
    await store.bind_request("t", "r", "s", TTL)
    assert sorted(raw.keys("*")) == sorted(key.encode() for key in (*keys, request_key("t", "r"), roll_key("w")))
    assert all(0 < raw.pttl(key) <= TTL * 1000 for key in raw.keys("*"))
    for write in ("append", "repeat", "claim"):
        for key in keys:
            raw.pexpire(key, 40_000)
        if write == "claim":
            await store.claim("s", "me")
        else:
            await store.append("s", fence, Append(4, (8,), (A,)))
        assert all(raw.pttl(key) > 50_000 for key in keys), write


async def test_flushed_scripts_are_registered_again(store: SessionStore, raw: Redis) -> None:
    fence = await store.create(record_of("s"), TTL)
    for position in range(3, 6):
        raw.script_flush()
        appends = [store.append("s", fence, Append(position, (7,), (A,))), store.read("s"), store.ping()]
        assert (await asyncio.gather(*appends))[0] == AppendReply(position + 1, False)


async def test_a_tick_is_one_round_trip(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fences = {name: await store.create(record_of(name), TTL) for name in "abcdefgh"}
    sent: list[int] = []
    assert isinstance(store, RedisStore)
    send = store._redis.send

    async def counting(node: Node, commands: Sequence[Command]) -> list[object]:
        sent.append(len(commands))
        return await send(node, commands)

    monkeypatch.setattr(store._redis, "send", counting)
    await asyncio.gather(*(store.append(name, fence, Append(3, (7,), (A,))) for name, fence in fences.items()))
    assert sent == [8]


async def test_a_silent_server_leaves_the_outcome_unknown_and_a_repeat_settles_it(
    store: SessionStore, hasty: SessionStore, redis: RedisServer
) -> None:
    """And its late reply is never taken for another call's."""
    fences = {name: await store.create(record_of(name), TTL) for name in "ab"}
    late = Append(3, (7, 8), (A, A), End(FinishReason.EOS, "", 2))
    redis.pause()
    await raised(StoreUnavailable, hasty.append("a", fences["a"], late), "the session log does not answer")
    redis.resume()
    assert await repeated(lambda: hasty.append("b", fences["b"], Append(3, (1,), (A,)))) == AppendReply(4, False)
    log = await log_of(store, "a")
    assert (log.tokens, log.reason) in (((), None), ((7, 8), FinishReason.EOS))
    assert (await repeated(lambda: hasty.append("a", fences["a"], late))).length == 5
    log = await log_of(store, "a")
    assert (log.tokens, log.reason) == ((7, 8), FinishReason.EOS)


async def test_a_cancelled_caller_does_not_disturb_the_others(store: SessionStore, redis: RedisServer) -> None:
    fences = {name: await store.create(record_of(name), TTL) for name in "ab"}
    leaving = asyncio.create_task(store.append("a", fences["a"], Append(3, (7,), (A,))))
    staying = asyncio.create_task(store.append("b", fences["b"], Append(3, (8,), (A,))))
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await staying).length == 4
    await raised(asyncio.CancelledError, leaving)
    assert (await store.append("a", fences["a"], Append(3, (7,), (A,)))).length == 4


async def test_many_who_wait_for_a_silent_server_hear_of_it_together(hasty: SessionStore, redis: RedisServer) -> None:
    """Not one round trip after the other."""

    def all_ask() -> list[asyncio.Task[StoredSession | None]]:
        return [asyncio.create_task(hasty.read("s")) for _ in range(5 * MOST_AT_ONCE)]

    redis.pause()
    done = await asyncio.gather(*all_ask(), return_exceptions=True)
    assert all(isinstance(error, StoreUnavailable) for error in done)
    redis.resume()
    assert set(await repeated(lambda: asyncio.gather(*all_ask()))) == {None}


async def test_closing_fails_what_still_waits(store: SessionStore, redis: RedisServer) -> None:
    redis.pause()
    waiting = asyncio.create_task(store.read("s"))
    await asyncio.sleep(0.01)
    await store.close()
    redis.resume()
    await raised(StoreUnavailable, waiting, "closed")
    await raised(StoreUnavailable, store.read("s"), "closed")


async def test_a_server_out_of_memory_refuses_and_nothing_changes(store: SessionStore, raw: Redis) -> None:
    fence = await store.create(record_of("s"), TTL)
    raw.config_set("maxmemory", "1")
    with pytest.raises(StoreUnavailable, match="takes no writes: Redis has no memory left"):
        await store.append("s", fence, Append(3, (7,), (A,)))
    await raised(StoreUnavailable, store.ping(), "takes no writes: Redis has no memory left")
    raw.config_set("maxmemory", "0")
    await store.ping()
    log = await log_of(store, "s")
    assert log.tokens == ()


@pytest.mark.parametrize("held", ["nothing", "an older fence", "the same fence", "a part"])
async def test_a_server_out_of_memory_begins_no_log_and_writes_none_again(
    store: SessionStore, raw: Redis, held: str
) -> None:
    """A session that it took could not be logged."""
    record, keys = record_of("s"), session_keys("s")
    fence = await store.create(record, TTL)
    await store.append("s", fence, Append(3, (7,), (A,)))
    if held == "nothing":
        raw.delete(*keys)
    elif held == "a part":
        raw.delete(keys[2])
    before = [raw.dump(key) for key in keys]
    raw.config_set("maxmemory", "1")
    if held == "nothing":
        await raised(StoreUnavailable, store.create(record, TTL), "takes no writes: Redis has no memory left")
    newer = fence + 1 if held == "an older fence" else fence
    with pytest.raises(StoreUnavailable, match="takes no writes: Redis has no memory left"):
        await store.recreate(record, Append(3, (7, 8), (A, A)), newer, TTL)
    assert [raw.dump(key) for key in keys] == before
    raw.config_set("maxmemory", "0")
    await store.recreate(record, Append(3, (7, 8), (A, A)), newer, TTL)
    log = await log_of(store, "s")
    assert (log.tokens, log.fence) == ((7, 8), newer)


async def test_a_server_out_of_memory_reads_deletes_and_is_given_signs_of_life(store: SessionStore, raw: Redis) -> None:
    fence = await store.create(record_of("s"), TTL)
    raw.config_set("maxmemory", "1")
    assert (await store.append("s", fence, Append(3, (), ()))).length == 3
    assert await store.read("s") is not None
    await store.delete("s")
    await raised(DeletedSession, store.read("s"))
    assert all(raw.pttl(key) > 0 for key in raw.keys("*"))


@pytest.mark.parametrize("fault", [unwritable, replica], ids=["disk", "replica"])
async def test_what_refuses_writes_says_so_in_a_sentence(fault: Fault) -> None:
    """Redis' own words, with the scripts' hashes, are for operators."""
    with RedisServer(save="3600 1") as redis, Redis(unix_socket_path=str(redis.socket)) as raw:
        store = await open_store(redis.url, timeout_s=TIMEOUT)
        fence = await store.create(record_of("s"), TTL)
        await store.ping()
        with fault(raw) as meaning:
            for call in (
                store.ping(),
                store.append("s", fence, Append(3, (7,), (A,))),
                store.create(record_of("t"), TTL),
            ):
                caught = await raised(StoreUnavailable, call)
                assert str(caught) == f"the session log takes no writes: {meaning}"
                assert caught.refused is (fault is unwritable)
                assert caught.detail
            assert await store.read("s") is not None
        await store.ping()
        await store.close()


async def test_a_failover_does_not_end_a_session_that_has_just_begun(
    redis: RedisServer, raw: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For some seconds the server is a read-only replica; only what lasts is given up so soon."""
    monkeypatch.setattr("orchestrator.session.appender.REFUSED_S", 0.0)
    refusals: asyncio.Queue[StoreUnavailable] = asyncio.Queue()

    store = await open_store(redis.url, timeout_s=TIMEOUT)
    append = store.append

    async def heard(*args: Any, **named: Any) -> AppendReply:
        try:
            return await append(*args, **named)
        except StoreUnavailable as error:
            refusals.put_nowait(error)
            raise

    monkeypatch.setattr(store, "append", heard)
    fence = await store.create(record_of("s"), TTL)
    appender = Appender(store, record_of("s"), fence, Output(), "me", Lifetimes(TTL, TTL), LIMIT_S)
    with replica(raw):
        writing = asyncio.create_task(appender.write(Append(3, (7,), (A,), None)))
        async with asyncio.timeout(LIMIT_S):
            for _ in range(2):
                assert "read-only" in str(await refusals.get())
    assert await writing is False
    await store.close()


@pytest.mark.parametrize(
    ("code", "lasts"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'", True),
        ("NOPERM this user has no permissions", True),
        ("NOAUTH Authentication required.", True),
        ("TRYAGAIN Multiple keys request during rehashing of slot", False),
        ("CLUSTERDOWN The cluster is down", False),
        ("MASTERDOWN Link with MASTER is down", False),
        ("NOREPLICAS Not enough good replicas to write.", False),
        ("BUSY Redis is busy running a script.", False),
    ],
)
def test_only_what_somebody_has_to_mend_is_a_refusal(code: str, lasts: bool) -> None:
    assert unavailable(ResponseError(code)).refused is lasts


async def test_what_a_stranger_wrote_into_redis_is_refused(store: SessionStore, raw: Redis) -> None:
    meta, tokens, _ = session_keys("s")
    fence = await store.create(record_of("s"), TTL)
    raw.append(tokens, b"odd")
    await raised(DamagedLog, store.read("s"), "no whole number of tokens")
    await raised(Gap, store.append("s", fence, Append(3, (7,), (A,))))
    await store.recreate(record_of("s"), Append(3, (7,), (A,)), fence, TTL)
    assert (await store.append("s", fence, Append(4, (8,), (A,)))).length == 5
    raw.hset(meta, "prompt", "long")
    await raised(Gap, store.append("s", fence, Append(5, (9,), (A,))))
    raw.hset(meta, "fence", "newest")
    await raised(StaleLog, store.append("s", fence, Append(5, (9,), (A,))), "its fence is no number")
    raw.delete(meta)
    raw.set(meta, "no hash")
    for call in (store.read("s"), store.claim("s", "me"), store.delete("s")):
        caught = await raised(StoreUnavailable, call, "the session log refused the call$")
        assert "WRONGTYPE" in caught.detail
    raw.set(request_key("t", "r"), b"\xff")
    assert (await store.bind_request("t", "r", "s", TTL)).session_id == "\ufffd"


META, TOKENS, OUTCOMES = range(3)
DAMAGES: dict[str, Callable[[Redis, tuple[str, str, str]], object]] = {
    "no record": lambda raw, keys: raw.hset(keys[META], "record", "{"),
    "another session's": lambda raw, keys: raw.hset(keys[META], "record", encode_record(record_of("other"))),
    "no owner": lambda raw, keys: raw.hdel(keys[META], "owner"),
    "no fence": lambda raw, keys: raw.hset(keys[META], "fence", "newest"),
    "reports missing": lambda raw, keys: raw.hdel(keys[META], "1"),
    "no tokens": lambda raw, keys: raw.delete(keys[TOKENS]),
    "half a token": lambda raw, keys: raw.append(keys[TOKENS], b"odd"),
    "no outcomes": lambda raw, keys: raw.delete(keys[OUTCOMES]),
    "no such outcome": lambda raw, keys: raw.setrange(keys[OUTCOMES], 0, b"\xff"),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_what_cannot_be_read_is_not_claimed_and_its_owner_writes_it_again(
    store: SessionStore, raw: Redis, damage: str
) -> None:
    record = record_of("s", sampling=Sampling(logprobs=0))
    held = Output([], [], [])
    fence = await store.create(record, TTL, "owner")
    owner = Appender(store, record, fence, held, "owner", Lifetimes(TTL, TTL), 5.0)
    for token in (7, 8):
        await append(owner, held, token)
    DAMAGES[damage](raw, session_keys("s"))
    await raised(DamagedLog, store.claim("s", "taker"))
    await append(owner, held, 9)
    log = await store.claim("s", "taker")
    assert (log.record, log.tokens, len(log.logprobs), log.owner) == (record, (7, 8, 9), 3, "taker")
    assert log.fence > fence
    assert not raw.hexists(session_keys("s")[META], "damaged")
    await raised(Fenced, append(owner, held, 10))


@pytest.mark.parametrize("key", [META, TOKENS, OUTCOMES])
async def test_what_a_stranger_put_in_a_log_s_place_its_owner_replaces(
    store: SessionStore, raw: Redis, key: int
) -> None:
    record, held = record_of("s", sampling=Sampling(logprobs=0)), Output([], [], [])
    owner = Appender(store, record, await store.create(record, TTL), held, "", Lifetimes(TTL, TTL), 5.0)
    await append(owner, held, 7)
    raw.delete(session_keys("s")[key])
    raw.lpush(session_keys("s")[key], "no log")
    await append(owner, held, 8)
    log = await log_of(store, "s")
    assert (log.tokens, len(log.logprobs)) == ((7, 8), 2)
    assert all(raw.pttl(each) > 0 for each in session_keys("s"))


async def append(owner: Appender, held: Output, token: int) -> None:
    """As the driver does it."""
    reported = TokenLogprobs(-1.0)
    await owner.write(Append(3 + len(held.tokens), (token,), (A,), None, (reported,)))
    held.tokens.append(token)
    held.outcomes.append(A)
    held.logprobs.append(reported)


async def test_every_way_of_writing_leaves_every_key_an_end(store: SessionStore, raw: Redis) -> None:
    fence = await store.create(record_of("ended"), TTL, retention_s=5.0)
    await store.append("ended", fence, Append(3, (7,), (A,), End(FinishReason.EOS, "", 1)))
    await store.cancel("ended")
    await store.claim("ended", "reader")
    assert all(0 < raw.pttl(key) <= 5_000 for key in session_keys("ended"))
    await store.recreate(record_of("lost"), Append(3, (7,), (A,)), 1000, TTL)
    await store.cancel("lost")
    await store.create(record_of("gone"), TTL)
    await store.delete("gone")
    await store.bind_request("t", "r", "gone", TTL)
    keys = raw.keys("*")
    assert len(keys) == 3 + 3 + 1 + 1 + 1
    assert all(raw.pttl(key) > 0 for key in keys)


@pytest.mark.parametrize("lifetime", ["junk", "-5", "nan", "1e300", "", None])
async def test_a_damaged_lifetime_leaves_no_key_without_an_end(
    store: SessionStore, raw: Redis, lifetime: str | None
) -> None:
    meta, tokens, _ = session_keys("s")

    async def damaged() -> int:
        raw.delete(*session_keys("s"))
        fence = await store.create(record_of("s"), TTL)
        for field in ("ttl_ms", "retention_ms"):
            raw.hdel(meta, field) if lifetime is None else raw.hset(meta, field, lifetime)
        return fence

    await store.append("s", await damaged(), Append(3, (7,), (A,)))
    assert all(raw.pttl(key) > 0 for key in session_keys("s"))
    await store.append("s", await damaged(), Append(3, (7,), (A,), End(FinishReason.EOS, "", 1)))
    assert all(raw.pttl(key) > 0 for key in session_keys("s"))
    await damaged()
    await store.delete("s")
    assert raw.keys(f"{meta[:-5]}*") == [meta.encode()]
    assert raw.pttl(meta) > 0
    await damaged()
    raw.hset(meta, "fence", "junk")
    await store.delete("s")
    assert int(raw.hget(meta, "fence") or 0) > 1_700_000_000_000_000
    raw.delete(meta)
    raw.set(tokens, b"a text that lost its hash")
    await store.delete("s")
    assert raw.keys(f"{meta[:-5]}*") == [meta.encode()]
    assert raw.pttl(meta) > 0


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("arguments", [(), (1,)], ids=["whole", "tail"])
async def test_a_settled_read_of_a_log_without_a_lifetime_gives_it_one(
    redis: RedisServer, raw: Redis, ended: bool, arguments: tuple[int, ...]
) -> None:
    """It is read with a write, of the lifetime that it has."""
    store = await open_store(redis.url)
    assert isinstance(store, RedisStore)
    fence = await store.create(record_of("s"), TTL, retention_s=5.0)
    await store.append("s", fence, Append(3, (7,), (A,)))
    if ended:
        await store.append("s", fence, Append(4, (), (), End(FinishReason.EOS, "", 1)))
    keys = session_keys("s")
    for key in keys:
        raw.persist(key)
    script = TAIL_SETTLED if arguments else READ_SETTLED
    assert (await store._call(script, keys, *arguments))[0] == 0
    least, most = (4_000, 5_000) if ended else (59_000, 60_000)
    assert all(least < raw.pttl(key) <= most for key in keys)
    raw.pexpire(keys[0], 7_000)
    assert (await store._call(script, keys, *arguments))[0] == 0
    assert 6_000 < raw.pttl(keys[0]) <= 7_000
    await store.close()


async def test_a_roll_holds_sessions_only(store: SessionStore, raw: Redis) -> None:
    raw.zadd(roll_key("w"), {b"\xff": 0, b"no session": 0, b"s-1": 0})
    await store.call_roll("w", ["s-2"], TTL, TTL)
    assert raw.pttl(roll_key("w")) > 0
    assert await store.missed("w", TTL, 9) == ["s-1"]
    assert raw.zcard(roll_key("w")) == 2


async def test_only_what_is_new_is_read_of_a_log(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fence = await store.create(record_of("s"), TTL)
    await store.append("s", fence, Append(3, (7,) * 500, (A,) * 500))
    assert isinstance(store, RedisStore)
    sizes: list[int] = []
    send = store._redis.send

    async def measuring(node: Node, commands: Sequence[Command]) -> list[object]:
        replies = await send(node, commands)
        sizes.extend(len(repr(reply)) for reply in replies)
        return replies

    monkeypatch.setattr(store._redis, "send", measuring)
    assert await store.tail("s", 499) is not None
    assert max(sizes) < 300


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("http://user:secret@host/", "http://user:\\*\\*\\*@host/' begins with none of redis"),
        ("redis", "'redis' begins with none of"),
        ("redis://:secret@127.0.0.1:port/0", "redis-url: port: must be .*: redis://:\\*\\*\\*@127.0.0.1:port/0"),
        ("redis://:secret@127.0.0.1:0/0", "port: must be from 1 to 65535"),
        ("redis://:secret@/0", "host: is empty"),
        ("redis://:secret@a,b/0", "host: several are for"),
        ("redis://:secret@a/zero", "database: must be a number"),
        ("redis://:secret/secret@a/0", "password: percent-encode"),
        ("redis://:secret?secret@a/0", "password: percent-encode"),
        ("redis://:secret@127.0.0.1/0?socket_timeout=secretly", "query: Invalid value for 'socket_timeout'"),
        ("redis+sentinel://:secret@a:1,b", "service: is missing"),
        ("redis+sentinel://:secret@a:1,/mymaster", "host: is empty"),
        ("redis+sentinel://:secret@a:x/mymaster", "port: must be"),
        ("redis+sentinel://:secret@a/mymaster/one", "database: must be a number"),
        ("redis+cluster://:secret@a/1", "database: a cluster has only 0"),
        ("redis+cluster://:secret@a?colour=red", "query: .*colour"),
        ("unix:///nowhere/redis.sock?password=secret", "cannot use unix:///nowhere/redis.sock: "),
        ("", "begins with none of"),
    ],
)
async def test_a_url_that_cannot_be_used_is_named_without_its_password(url: str, named: str) -> None:
    caught = await raised(StoreUnavailable, open_store(url, timeout_s=TIMEOUT), named)
    assert "secret" not in str(caught)


@dataclass
class Openings:
    """Counts how often logs that are opened have asked their servers; `enough` times are not exceeded."""

    tries: int = 0
    enough: int = 1000


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> Openings:
    counted, register = Openings(), RedisStore.register

    async def counting(store: RedisStore) -> None:
        if counted.tries == counted.enough:
            raise UnfitStore("asked often enough")
        counted.tries += 1
        await register(store)

    monkeypatch.setattr(RedisStore, "register", counting)
    return counted


async def test_nobody_there_is_said_at_once(dead_address: str, openings: Openings) -> None:
    with pytest.raises(StoreUnavailable, match=f"cannot use redis://:\\*\\*\\*@{dead_address}/0: .*[Cc]onnect"):
        await open_store(f"redis://:secret@{dead_address}/0", timeout_s=TIMEOUT, opening_s=2 * TIMEOUT)
    assert openings.tries == 1


async def test_someone_who_is_no_redis_is_given_up_on(taken_address: str) -> None:
    with pytest.raises(StoreUnavailable, match=f"cannot use redis://{taken_address}"):
        await open_store(f"redis://{taken_address}", timeout_s=SOON, opening_s=SOON)


async def test_a_server_that_answers_late_is_waited_for_at_the_start(redis: RedisServer, openings: Openings) -> None:
    redis.pause()
    opening = asyncio.create_task(open_store(redis.url, timeout_s=SOON, opening_s=LIMIT_S))
    await until(lambda: openings.tries == 2 or opening.done())
    redis.resume()
    store = await opening
    assert store.durability == "redis"
    await store.close()


@pytest.mark.parametrize("url", ["redis://{}", "redis+sentinel://{}/service", "redis+cluster://{}"])
async def test_whoever_is_silent_is_asked_again_at_the_start(url: str, taken_address: str, openings: Openings) -> None:
    openings.enough = 2
    with pytest.raises(StoreUnavailable, match="asked often enough"):
        await open_store(url.format(taken_address), timeout_s=SOON / 2, opening_s=LIMIT_S)


def test_what_of_a_url_may_be_shown() -> None:
    assert without_password("rediss://user:p/a@ss@host:1/2?password=x") == "rediss://user:***@host:1/2"
    assert without_password("unix:///a/b.sock") == "unix:///a/b.sock"
    assert without_password("redis+sentinel://u:p@a:1,b:2/s/0") == "redis+sentinel://u:***@a:1,b:2/s/0"
    assert without_password("redis://:p?ss@host") == "redis://***"


async def test_a_log_of_which_redis_evicted_a_part_is_made_whole(store: SessionStore, raw: Redis) -> None:
    record = record_of("s")
    fence = await store.create(record, TTL)
    await store.append("s", fence, Append(3, (7, 8), (A, A)))
    for part in session_keys("s"):
        raw.delete(part)
        await raised((Gap, MissingSession), store.append("s", fence, Append(5, (9,), (A,))))
        await store.recreate(record, Append(3, (7, 8), (A, A)), fence, TTL)
        log = await log_of(store, "s")
        assert (log.tokens, log.outcomes) == ((7, 8), (A, A))
    assert all(raw.pttl(key) > 0 for key in raw.keys("*"))


async def test_damage_that_a_reader_finds_is_mended_too(store: SessionStore, raw: Redis) -> None:
    record = record_of("s")
    fence = await store.create(record, TTL)
    await store.append("s", fence, Append(3, (7, 8), (A, A)))
    raw.setrange(session_keys("s")[OUTCOMES], 0, b"\xff")
    assert await store.tail("s", 1) is not None
    for look in (store.read("s"), store.tail("s", 0)):
        await raised(DamagedLog, look)
    await raised(Gap, store.append("s", fence, Append(5, (9,), (A,))))
    await store.recreate(record, Append(3, (7, 8), (A, A)), fence, TTL)
    assert (await store.append("s", fence, Append(5, (9,), (A,)))).length == 6
