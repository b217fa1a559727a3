"""The wall clock steps by hours in the middle of a text, as where NTP answers late: no text ends or changes by that.

Of Redis beside the orchestrator the step is what it does to expiring keys: they expire by the wall clock.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import redis.asyncio

from orchestrator.session import appender
from orchestrator.store import LEASE_S
from specwire.client import Chunk, Started
from specwire.core.messages import FinishReason
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.stack import DRAFT, SLOW_TARGET, Stack, held, plain, stack

PROMPT = (5, 6, 7)
LENGTH = 40
# Both longer than a lease, and than a running session's log is kept without its owner.
HOURS = 2 * 3600.0
OURS = ("orchestrator", "verify_service", "draft_service", "specwire")
Step = Callable[[float], Awaitable[None]]


class WallClock:
    """The module `time` as our code sees it: the wall clock is as much ahead as a test says."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def time(self) -> float:
        return time.time() + self.ahead

    def time_ns(self) -> int:
        return time.time_ns() + round(self.ahead * 1e9)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@contextmanager
def seen_by_our_code(wall: WallClock) -> Iterator[None]:
    """GRPC's own code goes on by the system's: in a process it cannot step alone."""
    ours = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in OURS]
    with ExitStack() as patches:
        for module in ours:
            if getattr(module, "time", None) is time:
                patches.enter_context(patch.object(module, "time", wall))
        yield


@asynccontextmanager
async def stepping(kind: str, folder: Path) -> AsyncIterator[tuple[str, Step]]:
    """A log's URL, and what has the wall clock step."""
    wall = WallClock()

    async def step(seconds: float) -> None:
        wall.ahead += seconds

    with seen_by_our_code(wall):
        if kind != "redis":
            yield "memory:" if kind == "memory" else f"file:{folder / 'log'}", step
            return
        with RedisServer() as server:

            async def step_with_redis(seconds: float) -> None:
                await step(seconds)
                await expire_sooner(server.url, seconds)

            yield server.url, step_with_redis


async def expire_sooner(url: str, seconds: float) -> None:
    async with redis.asyncio.from_url(url) as client:
        async for key in client.scan_iter():
            left = await client.pttl(key)
            if 0 <= left <= seconds * 1000:
                await client.delete(key)
            elif left > 0:
                await client.pexpire(key, round(left - seconds * 1000))


async def text_of(
    running: Stack, step: Step, steps: list[float], let_go: Callable[[int], None]
) -> tuple[str, list[int]]:
    """A session, and its text with steps in the middle, and signs of life behind each of them."""
    session_id, tokens, left = "", list[int](), list(steps)
    request = running.client.generate(
        PROMPT, max_tokens=LENGTH, ignore_eos=True, request_id="one", timeout=600.0, temperature=0.0
    )
    async for event in request:
        if isinstance(event, Started):
            session_id = event.session_id
        if isinstance(event, Chunk):
            tokens += event.tokens
        if left and tokens:
            await step(left.pop(0))
            await asyncio.gather(*(log.renew() for log in running.orchestrator.orchestrator._logs()))
        if tokens:
            let_go(8)
    return session_id, tokens


@pytest.mark.parametrize("steps", [[HOURS], [-HOURS], [HOURS, -2 * HOURS, 3 * HOURS]], ids=["forth", "back", "both"])
@pytest.mark.parametrize("kind", ["memory", "file", "redis"])
async def test_a_step_of_the_wall_clock_changes_no_text(
    kind: str, steps: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appender, "RENEW_S", 0.0)
    async with stepping(kind, tmp_path) as (url, step), stack(SLOW_TARGET, DRAFT, redis_url=url) as running:
        with held(4) as let_go:
            session_id, tokens = await text_of(running, step, steps, let_go)
        assert tokens == plain(SLOW_TARGET, PROMPT, LENGTH)
        if kind != "redis":  # whose own keys expire by the wall clock, once nobody gives a sign of life
            await step(HOURS)
        again = await running.client.complete(
            PROMPT, max_tokens=LENGTH, ignore_eos=True, request_id="one", temperature=0.0
        )
        assert (list(again.tokens), again.finish_reason) == (tokens, FinishReason.LENGTH)
        assert again.session_id == session_id, "its log was gone"
    assert HOURS > LEASE_S
