"""A question to Redis that is given up ends, at whatever moment: a service that stops waits for its heartbeat's end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from specwire.redis import ONLY_NODE, RedisConnection, connection_of
from specwire.registry.directory import FIELD
from tests.orchestrator.redis_for_tests import RedisServer

# Turns of the loop before it is given up: more than a question takes.
TURNS = range(1, 20)
# More than are asked before it is given up; then it would end by itself.
QUESTIONS = 100


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[RedisConnection]:
    opened = connection_of(server.url, 5.0, FIELD)
    await opened.send(ONLY_NODE, [("PING",)])
    yield opened
    await opened.close()


async def ask_on(redis: RedisConnection) -> None:
    for _ in range(QUESTIONS):
        await redis.send(ONLY_NODE, [("PING",)])


@pytest.mark.parametrize("turns", TURNS)
async def test_who_asks_again_and_again_can_be_stopped(redis: RedisConnection, turns: int) -> None:
    asking = asyncio.create_task(ask_on(redis))
    for _ in range(turns):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled()


@pytest.mark.parametrize("turns", TURNS)
async def test_a_time_limit_holds(redis: RedisConnection, turns: int) -> None:
    """It cancels as well, and is a TimeoutError to who has set it."""
    limit = asyncio.timeout(None)

    async def ask() -> None:
        async with limit:
            await ask_on(redis)

    asking = asyncio.create_task(ask())
    for _ in range(turns):
        await asyncio.sleep(0)
    limit.reschedule(0.0)
    await asyncio.wait({asking})
    assert isinstance(asking.exception(), TimeoutError)
