"""Script calls to Redis, batched: calls of one loop tick go out in one round trip."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from redis.exceptions import NoScriptError, RedisError

from orchestrator.store.base import StoreUnavailable, UnfitStore, no_answer, unavailable
from specwire.redis import Argument, Command, Node, RedisConnection, is_trouble

Reply = list[object]

# Calls in one round trip: many large ones would not be answered in time.
MOST_AT_ONCE = 256
# Share of a round trip's time that Redis may wait for its replicas.
WAIT_SHARE = 0.8
CLOSED = "the store was closed"


@dataclass(frozen=True, slots=True)
class LuaScript:
    """A Lua script, called by its hash.

    repeated: its caller repeats it where there is no answer.
    """

    source: str
    writes: bool = True
    repeated: bool = False
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest())


@dataclass(slots=True)
class _Request:
    script: LuaScript
    keys: Sequence[str]
    arguments: Sequence[Argument]
    reply: asyncio.Future[Reply]

    @property
    def command(self) -> Command:
        return ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.arguments)


class Lane:
    """One round trip is under way at a time; later calls leave with the next.

    Args: as of `Batcher`.
    """

    def __init__(
        self,
        redis: RedisConnection,
        node: Node,
        timeout_s: float,
        replicas: int,
        check: Callable[[Node], Awaitable[None]] | None,
    ) -> None:
        self._redis = redis
        self._node = node
        self._timeout_s = timeout_s
        self._replicas = replicas
        self._check = check
        self._checked = False
        self._staged: list[_Request] = []
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] = self._loop.create_future()
        self._task = self._loop.create_task(self._run(), name=f"store-lane {node}")

    async def call(self, script: LuaScript, keys: Sequence[str], *arguments: Argument) -> Reply:
        """The script's reply. Raises StoreUnavailable."""
        request = _Request(script, keys, arguments, self._loop.create_future())
        self._staged.append(request)
        self._go()
        return await request.reply

    def post(self, script: LuaScript, keys: Sequence[str], *arguments: Argument) -> None:
        """Call it in the next round trip, and ignore the outcome."""
        request = _Request(script, keys, arguments, self._loop.create_future())
        request.reply.add_done_callback(lambda reply: reply.cancelled() or reply.exception())
        self._staged.append(request)
        self._go()

    async def register(self, scripts: Collection[LuaScript]) -> None:
        """Load the scripts. Raises StoreUnavailable."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._prepare()
                await self._load(scripts)
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            raise silence(error, self._timeout_s) from error

    async def close(self) -> None:
        """End the task; calls that are still waiting get StoreUnavailable. Idempotent."""
        self._task.cancel()
        await asyncio.wait([self._task])
        _fail(self._staged, StoreUnavailable(CLOSED))

    def _go(self) -> None:
        if not self._wake.done():
            self._wake.set_result(None)

    async def _run(self) -> None:
        while True:
            await self._wake
            self._wake = self._loop.create_future()
            batch, self._staged = self._staged[:MOST_AT_ONCE], self._staged[MOST_AT_ONCE:]
            if self._staged:
                self._go()
            try:
                async with asyncio.timeout(self._timeout_s):
                    if not all(request.script.repeated for request in batch):
                        await self._try_connection()
                    await self._prepare()
                    await self._round_trip(batch)
            except TimeoutError:
                await self._give_up(batch, no_answer(f"no answer within {self._timeout_s:g} s"))
            except asyncio.CancelledError:
                _fail(batch, StoreUnavailable(CLOSED))
                raise
            except Exception as error:  # any error: the callers must learn of it, and the task must go on
                await self._give_up(batch, error if isinstance(error, StoreUnavailable) else unavailable(error))

    async def _prepare(self) -> None:
        if self._check is not None and not self._checked:
            await self._check(self._node)
            self._checked = True

    async def _try_connection(self) -> None:
        """Replace a connection that broke while it was idle, before a call's outcome depends on it."""
        try:
            await self._redis.send(self._node, [("PING",)])
        except (RedisError, OSError):
            await self._doubt()

    async def _give_up(self, batch: Sequence[_Request], reason: StoreUnavailable) -> None:
        """Fail all waiting calls now: they would only wait for the same error."""
        waiting, self._staged = self._staged, []
        _fail([*batch, *waiting], reason)
        await self._doubt()

    async def _doubt(self) -> None:
        """Drop connections and what is known of the servers."""
        self._checked = False
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._redis.reset(self._node)
        except (RedisError, OSError):
            return  # the connection was broken already

    async def _round_trip(self, batch: list[_Request]) -> None:
        unknown = await self._send(batch)
        if unknown:  # Redis was restarted or its scripts were flushed: those calls did nothing yet
            await self._load({request.script for request in unknown})
            for request in await self._send(unknown):
                _fail([request], no_answer("Redis does not keep scripts"))

    async def _send(self, batch: Sequence[_Request]) -> list[_Request]:
        """Send in one round trip and hand out the replies; returns the requests whose script Redis does not know."""
        commands = [request.command for request in batch]
        if self._replicas and any(request.script.writes for request in batch):
            commands.append(("WAIT", self._replicas, int(WAIT_SHARE * self._timeout_s * 1000)))
        replies = await self._redis.send(self._node, commands)
        shortfall = self._shortfall(replies[len(batch) :]) if self._replicas else ""
        unknown: list[_Request] = []
        for request, reply in zip(batch, replies, strict=False):
            if isinstance(reply, NoScriptError):
                unknown.append(request)
            elif request.script.writes and shortfall:
                _fail([request], StoreUnavailable(f"the session log is not sure to keep it: {shortfall}"))
            else:
                _resolve(request, reply)
        if any(map(is_trouble, replies)):
            await self._doubt()
        return unknown

    def _shortfall(self, waited: Sequence[object]) -> str:
        """Why the writes are not durable yet, by the reply to WAIT, if that was sent; empty if they are."""
        for answer in waited:
            if not isinstance(answer, int):
                return f"WAIT says: {answer}"
            if answer < self._replicas:
                return f"{answer} of {self._replicas} replicas have acknowledged the write"
        return ""

    async def _load(self, scripts: Collection[LuaScript]) -> None:
        for reply in await self._redis.send(self._node, [("SCRIPT LOAD", script.source) for script in scripts]):
            if isinstance(reply, Exception):
                raise reply


def _resolve(request: _Request, reply: object) -> None:
    """Hand the reply to its caller."""
    if request.reply.done():  # its caller was cancelled
        return
    if isinstance(reply, list):
        request.reply.set_result(reply)
    else:
        request.reply.set_exception(unavailable(reply))


def _fail(batch: Sequence[_Request], reason: StoreUnavailable) -> None:
    for request in batch:
        if not request.reply.done():  # one exception each, because raising adds a traceback
            request.reply.set_exception(StoreUnavailable(str(reason), reason.detail, reason.refused))


def silence(error: RedisError | OSError, timeout_s: float) -> StoreUnavailable:
    """The error of a round trip that brought no answer."""
    return unavailable(error) if str(error) else no_answer(f"no answer within {timeout_s:g} s")


# ----------------------------------------------------------------------------------------------------------------------
# Script calls to Redis: each to the server that holds its keys, each server with a lane of its own.

# Keys that are tried to find one at each server.
MOST_KEYS = 1024


class Batcher:
    """Owns the lanes.

    Args:
        timeout_s: for one round trip. After it the outcome is unknown and the callers get StoreUnavailable.
        replicas: how many must have acknowledged a write before its caller hears of it.
        check: is awaited before the first round trip with a server, and before the first one after a failure, because
            another server may answer then, or the same one with other settings. Raises StoreUnavailable.
    """

    def __init__(
        self,
        redis: RedisConnection,
        timeout_s: float,
        replicas: int = 0,
        check: Callable[[Node], Awaitable[None]] | None = None,
    ) -> None:
        self._redis = redis
        self._timeout_s = timeout_s
        self._replicas = replicas
        self._check = check
        self._lanes: dict[Node, Lane] = {}
        self._closed = False

    async def call(self, script: LuaScript, keys: Sequence[str], *arguments: Argument) -> Reply:
        """The script's reply; the keys share a slot. Raises StoreUnavailable.

        Cancelling the caller does not take the call back.
        """
        if not self._redis.known:
            await self._ready()
        try:
            node = self._redis.node_of(keys)
        except RedisError as error:
            await self._redis.reset(self._redis.nodes()[0])
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
        wanted = set(self._redis.nodes())
        for number in range(MOST_KEYS):
            if keys.keys() >= wanted:
                break
            with suppress(RedisError):  # a slot that nobody serves now
                keys.setdefault(self._redis.node_of([key_of(number)]), key_of(number))
        return keys

    async def post(self, script: LuaScript, keys: Sequence[str], *arguments: Argument) -> None:
        """Call it without waiting for the outcome, or for a server that does not answer.

        On the same server it runs before later calls. Raises StoreUnavailable where no server is known.
        """
        await self._ready()
        with suppress(RedisError):
            self._lane(self._redis.node_of(keys)).post(script, keys, *arguments)

    async def register(self, scripts: Collection[LuaScript]) -> None:
        """Load the scripts ahead of their first call, wherever somebody answers. StoreUnavailable if nobody does."""
        await self._ready()
        lanes = [self._lane(node) for node in self._redis.nodes()]
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
        if self._redis.known:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._redis.ready()
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            raise silence(error, self._timeout_s) from error

    def _lane(self, node: Node) -> Lane:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        if node not in self._lanes:
            self._lanes[node] = Lane(self._redis, node, self._timeout_s, self._replicas, self._check)
        return self._lanes[node]
