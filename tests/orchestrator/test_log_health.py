"""A log that takes no writes is known while nobody asks, refuses sessions at once, and is heard of when it is back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import httpx2 as httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis import Redis

from orchestrator.store import StoreUnavailable
from orchestrator.store import health as module
from orchestrator.store.health import LogHealth
from orchestrator.store.sqlite import SqliteStore
from specwire.client import AsyncClient, SpecwireError
from specwire.core.messages import FinishReason
from specwire.rpc.errors import StatusError
from specwire.v1 import status_pb2, status_pb2_grpc
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.redis_groups import SERVICE, log_bytes, replicated, sentinel
from tests.orchestrator.stack import PROMPT, SLOW_TARGET, TARGET, Reading, Stack, plain, stack
from tests.wait import raised, until

LIMIT_S = 20.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
FULL = "the session log takes no writes: Redis has no memory left"
AWAY = "the session log does not answer"


class Refusing(SqliteStore):
    """Refuses with these words while there are any; `asked` counts questions."""

    words = ""
    asked = 0

    async def ping(self) -> None:
        self.asked += 1
        if self.words:
            raise StoreUnavailable(self.words, "OOM in script 5f3a", refused=True)


class Health:
    """One that is asked without pause. `changes`: what it said of whether the log has trouble.

    fails: whoever is told of the next change fails.
    """

    def __init__(self, store: SqliteStore) -> None:
        self.changes: list[bool] = []
        self.fails = False
        self.log = LogHealth(store, self._changed)

    async def _changed(self) -> None:
        self.changes.append(bool(self.log.trouble))
        if self.fails:
            self.fails = False
            raise RuntimeError("readiness cannot be told")


@asynccontextmanager
async def health(store: SqliteStore) -> AsyncIterator[Health]:
    watched = Health(store)
    running = asyncio.create_task(watched.log.run())
    try:
        yield watched
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_changed_reason_is_no_further_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failover says first that nobody answers, then that a replica does: an operator is warned of it once."""
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    caplog.set_level(logging.INFO, module.__name__)
    store = Refusing()
    async with health(store) as watched:
        for words in (AWAY, FULL, ""):
            store.words = words
            await until(lambda words=words: store.asked > 0 and watched.log.trouble == words)  # type: ignore[misc]
            asked = store.asked
            await until(lambda asked=asked: store.asked > asked + 2)  # type: ignore[misc]
    assert watched.changes == [True, False]
    levels = [(record.levelno, record.getMessage().split(" (")[0]) for record in caplog.records]
    assert [level for level, _ in levels] == [logging.WARNING, logging.INFO, logging.WARNING]
    assert [said for _, said in levels[:2]] == [AWAY, FULL]
    assert caplog.messages[0] == f"{AWAY} (OOM in script 5f3a); no session begins"


async def test_who_cannot_be_told_of_it_is_told_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    store = Refusing()
    async with health(store) as watched:
        for words, changes in ((FULL, 2), ("", 4), (FULL, 6)):
            watched.fails, store.words = True, words
            await until(lambda changes=changes: len(watched.changes) == changes)  # type: ignore[misc]
    assert watched.changes == [True, True, False, False, True, True]
    failures = [record.exc_info for record in caplog.records if record.levelno == logging.ERROR]
    assert [str(each[1]) for each in failures if each] == ["readiness cannot be told"] * 3


async def test_whoever_begins_in_trouble_has_the_log_asked_once_more() -> None:
    store = Refusing()
    store.words = FULL
    async with health(store) as watched:
        await until(lambda: bool(watched.log.trouble))
        caught = await raised(StatusError, watched.log.require())
        assert (caught.code, caught.message) == (grpc.StatusCode.UNAVAILABLE, FULL)
        assert caught.retry_after
        store.words = ""
        await watched.log.require()
        assert watched.log.trouble == ""


async def serving(address: str) -> health_pb2.HealthCheckResponse.ServingStatus:
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
    return answer.status


async def status(address: str) -> status_pb2.GetStatusResponse:
    async with grpc.aio.insecure_channel(address) as channel:
        stub, request = status_pb2_grpc.StatusServiceStub(channel), status_pb2.GetStatusRequest()
        told: status_pb2.GetStatusResponse = await stub.GetStatus(request, timeout=LIMIT_S)
    return told


async def check(parts: Stack, http: httpx.AsyncClient, trouble: str) -> None:
    """All that tells of readiness tells the same, within the limit."""
    orchestrator = parts.orchestrator
    await until(lambda: orchestrator.orchestrator.log.trouble == trouble, LIMIT_S)
    wanted = NOT_SERVING if trouble else SERVING

    async def told_so() -> bool:
        return bool(await serving(orchestrator.address) == wanted)

    await until(told_so, LIMIT_S)
    ready = await http.get("/ready")
    assert ready.json() == {"ready": not trouble, "reason": trouble or None}
    assert ready.status_code == (503 if trouble else 200)
    told = await status(orchestrator.address)
    assert told.log_trouble == trouble
    assert bool(told.log_trouble_ms) == bool(trouble)


async def check_refused(parts: Stack, http: httpx.AsyncClient, trouble: str) -> None:
    wish = {"prompt": list(PROMPT), "max_tokens": 4}
    for extra in ({}, {"request_id": "r"}):
        answer = await http.post("/v1/completions", json=wish | extra)
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, trouble)
        assert answer.headers["retry-after"] == "1"
        async with AsyncClient(parts.orchestrator.address, patience=0) as client:
            caught = await raised(
                SpecwireError, client.complete(list(PROMPT), max_tokens=4, request_id=extra.get("request_id", ""))
            )
        assert (caught.code, caught.message) == (grpc.StatusCode.UNAVAILABLE, trouble)


async def check_served(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={"prompt": list(PROMPT), "max_tokens": 4})
    assert answer.status_code == 200, answer.text


async def test_a_log_lost_while_idle_is_told_by_everything_and_so_is_its_return(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "orchestrator.store.health")
    with Redis(unix_socket_path=str(redis.socket)) as raw:
        async with stack(TARGET, redis_url=redis.url, http="127.0.0.1:0") as parts:
            assert parts.orchestrator.http is not None
            async with httpx.AsyncClient(base_url=parts.orchestrator.http, timeout=LIMIT_S) as http:
                await check(parts, http, "")
                await check_served(http)
                raw.config_set("maxmemory", "1")
                await check(parts, http, FULL)
                await check_refused(parts, http, FULL)
                raw.config_set("maxmemory", "0")
                await check(parts, http, "")
                await check_served(http)
                raw.close()
                redis.stop()
                await check(parts, http, AWAY)
                await check_refused(parts, http, AWAY)
                redis.start()
                await check(parts, http, "")
                await check_served(http)
    told = [record.getMessage() for record in caplog.records if record.name == "orchestrator.store.health"]
    assert [line.startswith("the session log takes writes again, after ") for line in told] == [False, True] * 2


# ----------------------------------------------------------------------------------------------------------------------
# A whole stack whose Redis goes away: nothing is shown that is not durable, and the end has a status.


async def test_a_primary_lost_under_a_stream_is_replaced() -> None:
    with replicated() as (primary, replica), sentinel(primary) as address:
        async with stack(SLOW_TARGET, redis_url=f"redis+sentinel://{address}/{SERVICE}") as running:
            reading = Reading(running.client, max_tokens=400, ignore_eos=True, timeout=120.0)
            await reading.until(50)
            primary.stop()
            await reading.rest()
            assert reading.error is None
            assert reading.tokens == plain(SLOW_TARGET, PROMPT, 400)
            assert reading.finished is not None
            assert reading.finished.reason is FinishReason.LENGTH
            assert log_bytes(replica, reading.session_id) == 4 * (len(PROMPT) + 400)


async def test_a_log_that_stays_away_ends_the_stream_and_shows_nothing_more(redis: RedisServer) -> None:
    async with (
        stack(SLOW_TARGET, redis_url=redis.url, store_timeout=1.0) as running,
        AsyncClient(running.orchestrator.address, patience=0) as client,
    ):
        reading = Reading(client, max_tokens=1000, ignore_eos=True, timeout=120.0)
        await reading.until(30)
        driver = running.orchestrator.orchestrator.sessions[reading.session_id]
        session = driver.session
        redis.stop()
        await reading.rest()
        assert reading.error is not None
        assert reading.error.code is grpc.StatusCode.UNAVAILABLE
        assert "session log" in reading.error.message
        assert len(PROMPT) + len(reading.tokens) == session.emitted == session.durable
        assert session.durable < len(session.text) <= session.credit  # it went on deciding as far as its credit went
        assert reading.tokens == plain(SLOW_TARGET, PROMPT, len(reading.tokens))
