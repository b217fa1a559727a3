"""Script calls to Redis: each to the server that holds its keys, each server with a lane of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress

from redis.exceptions import RedisError

from orchestrator.store.errors import StoreUnavailable, UnfitStore, no_answer, unavailable
from orchestrator.store.lanes import Lane, LuaScript, Reply, silence
from specwire.redis.lines import Argument, Lines, Node

# Keys that are tried to find one at each server.
MOST_KEYS = 1024


class Batcher:
    """Owns the lanes.

    Args:
        timeout_s: for one round trip. After it the outcome is unknown and the callers get StoreUnavailable.
        replicas: how many must have acknowledged a write before its caller hears of it.
        check: is awaited before the first round trip with a server, and before the next one after a failure: another
            one may answer then, or the same one with other settings. Raises StoreUnavailable.
    """

    def __init__(
        self,
        lines: Lines,
        timeout_s: float,
        replicas: int = 0,
        check: Callable[[Node], Awaitable[None]] | None = None,
    ) -> None:
        self._lines = lines
        self._timeout_s = timeout_s
        self._replicas = replicas
        self._check = check
        self._lanes: dict[Node, Lane] = {}
        self._closed = False

    async def call(self, script: LuaScript, keys: Sequence[str], *arguments: Argument) -> Reply:
        """The script's reply; the keys share a slot. Raises StoreUnavailable.

        Cancelling the caller does not take the call back.
        """
        await self._ready()
        try:
            node = self._lines.node_of(keys)
        except RedisError as error:
            await self._lines.reset(self._lines.nodes()[0])
            raise unavailable(error) from error
        return await self._lane(node).call(script, keys, *arguments)

    async def call_each(self, script: LuaScript, key_of: Callable[[int], str], *arguments: Argument) -> None:
        """Call it with one key at every server that holds keys. Raises StoreUnavailable where none does it.

        key_of: a key, for each number from 0; some keys lie at each server.
        """
        await self._ready()
        keys = self._key_at_each(key_of)
        calls = (self._lane(node).call(script, [key], *arguments) for node, key in keys.items())
        done = await asyncio.gather(*calls, return_exceptions=True)
        errors = [error for error in done if isinstance(error, BaseException)]
        if len(errors) == len(done):
            raise errors[0] if errors else no_answer("no server is known")

    def _key_at_each(self, key_of: Callable[[int], str]) -> dict[Node, str]:
        keys: dict[Node, str] = {}
        wanted = set(self._lines.nodes())
        for number in range(MOST_KEYS):
            if keys.keys() >= wanted:
                break
            with suppress(RedisError):  # a slot that nobody serves now
                keys.setdefault(self._lines.node_of([key_of(number)]), key_of(number))
        return keys

    async def post(self, script: LuaScript, keys: Sequence[str], *arguments: Argument) -> None:
        """Have it called, and do not wait for how that goes, nor for a server that does not answer.

        With the same server it is done before what is called next. Raises StoreUnavailable where no server is known.
        """
        await self._ready()
        with suppress(RedisError):
            self._lane(self._lines.node_of(keys)).post(script, keys, *arguments)

    async def register(self, scripts: Collection[LuaScript]) -> None:
        """Load the scripts ahead of their first call, wherever somebody answers. StoreUnavailable if nobody does."""
        await self._ready()
        lanes = [self._lane(node) for node in self._lines.nodes()]
        done = await asyncio.gather(*(lane.register(scripts) for lane in lanes), return_exceptions=True)
        errors = [error for error in done if isinstance(error, BaseException)]
        unfit = [error for error in errors if not isinstance(error, StoreUnavailable) or isinstance(error, UnfitStore)]
        if unfit or len(errors) == len(lanes):
            raise (unfit or errors)[0]

    async def close(self) -> None:
        """End all tasks; calls that are still waiting get StoreUnavailable. Idempotent."""
        self._closed = True
        await asyncio.gather(*(lane.close() for lane in self._lanes.values()))

    async def _ready(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        if self._lines.known:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._lines.ready()
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            raise silence(error, self._timeout_s) from error

    def _lane(self, node: Node) -> Lane:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        if node not in self._lanes:
            self._lanes[node] = Lane(self._lines, node, self._timeout_s, self._replicas, self._check)
        return self._lanes[node]
