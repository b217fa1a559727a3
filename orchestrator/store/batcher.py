"""Script calls to Redis, batched: what is asked for within one loop tick goes out in one pipelined round trip."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from orchestrator.store.base import StoreUnavailable

Argument = str | int | bytes
Reply = list[object]


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script, called by its hash."""

    source: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest())


@dataclass(slots=True)
class _Request:
    script: Script
    keys: Sequence[str]
    arguments: Sequence[Argument]
    reply: asyncio.Future[Reply]


class Batcher:
    """Owns the connection's use. One round trip is under way at a time; what comes meanwhile leaves with the next.

    Args:
        timeout_s: for one round trip. After it the outcome is unknown and the callers get StoreUnavailable.
    """

    def __init__(self, client: Redis, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._staged: list[_Request] = []
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] = self._loop.create_future()
        self._closed = False
        self._task = self._loop.create_task(self._run(), name="store-batcher")

    async def call(self, script: Script, keys: Sequence[str], *arguments: Argument) -> Reply:
        """The script's reply. Raises StoreUnavailable. Cancelling the caller does not take the call back."""
        if self._closed:
            raise StoreUnavailable("the store is closed")
        request = _Request(script, keys, arguments, self._loop.create_future())
        self._staged.append(request)
        if not self._wake.done():
            self._wake.set_result(None)
        return await request.reply

    async def register(self, scripts: Collection[Script]) -> None:
        """Load the scripts ahead of their first call. Raises StoreUnavailable."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._load(scripts)
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            raise StoreUnavailable(_no_answer(str(error) or f"within {self._timeout_s:g} s")) from error

    async def close(self) -> None:
        """End the task; calls that are still waiting get StoreUnavailable. Idempotent."""
        self._closed = True
        self._task.cancel()
        await asyncio.wait([self._task])
        _fail(self._staged, "the store was closed")

    async def _run(self) -> None:
        while True:
            await self._wake
            self._wake = self._loop.create_future()
            batch, self._staged = self._staged, []
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._round_trip(batch)
            except TimeoutError:
                _fail(batch, f"no answer within {self._timeout_s:g} s")
            except asyncio.CancelledError:
                _fail(batch, "the store was closed")
                raise
            except Exception as error:  # whatever it is, the callers must learn of it and the task go on
                _fail(batch, str(error) or type(error).__name__)

    async def _round_trip(self, batch: list[_Request]) -> None:
        unknown = await self._send(batch)
        if unknown:  # Redis was restarted or its scripts were flushed: those calls did nothing yet
            await self._load({request.script for request in unknown})
            for request in await self._send(unknown):
                _fail([request], "Redis does not keep scripts")

    async def _send(self, batch: list[_Request]) -> list[_Request]:
        """Send in one pipeline and hand out the replies; returns the requests whose script Redis does not know."""
        pipeline = self._client.pipeline(transaction=False)
        for request in batch:
            pipeline.execute_command(
                "EVALSHA", request.script.sha, len(request.keys), *request.keys, *request.arguments
            )
        replies = await pipeline.execute(raise_on_error=False)
        return [request for request, reply in zip(batch, replies, strict=True) if not _resolve(request, reply)]

    async def _load(self, scripts: Collection[Script]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for script in scripts:
            pipeline.execute_command("SCRIPT LOAD", script.source)
        await pipeline.execute()


def _resolve(request: _Request, reply: object) -> bool:
    """Hand the reply to its caller; False where the script is unknown."""
    if isinstance(reply, NoScriptError):
        return False
    if request.reply.done():  # its caller was cancelled
        return True
    if isinstance(reply, list):
        request.reply.set_result(reply)
    else:
        what = reply if isinstance(reply, ResponseError) else f"unexpected reply {reply!r}"
        request.reply.set_exception(StoreUnavailable(f"the session log refused: {what}"))
    return True


def _fail(batch: Sequence[_Request], reason: str) -> None:
    for request in batch:
        if not request.reply.done():
            request.reply.set_exception(StoreUnavailable(_no_answer(reason)))


def _no_answer(reason: str) -> str:
    return f"the session log does not answer: {reason}"
