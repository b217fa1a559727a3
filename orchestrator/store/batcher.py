"""Script calls to Redis, batched: what is asked for within one loop tick goes out in one pipelined round trip."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

from redis.exceptions import AskError, ClusterError, NoScriptError, RedisError, ResponseError

from orchestrator.store.base import StoreUnavailable
from orchestrator.store.lines import Argument, Command, Lines, Parcel

Reply = list[object]

# Calls in one round trip: many large ones would not be answered in time.
MOST_AT_ONCE = 256
# Of the time for a round trip, what Redis may wait for its replicas.
WAIT_SHARE = 0.8
# In the answer of a server that has become a replica.
READ_ONLY = "READONLY"


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script, called by its hash."""

    source: str
    writes: bool = True
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest())


@dataclass(slots=True)
class _Request:
    script: Script
    keys: Sequence[str]
    arguments: Sequence[Argument]
    reply: asyncio.Future[Reply]

    @property
    def command(self) -> Command:
        return ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.arguments)


class Batcher:
    """Owns the connections' use. One round trip is under way at a time; what comes meanwhile leaves with the next.

    Args:
        timeout_s: for one round trip. After it the outcome is unknown and the callers get StoreUnavailable.
        replicas: how many must have acknowledged a write before its caller hears of it.
        check: is awaited before the first round trip, and before the next one after a failure: another server may
            answer then, or the same one with other settings. Raises StoreUnavailable.
    """

    def __init__(
        self, lines: Lines, timeout_s: float, replicas: int = 0, check: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._lines = lines
        self._timeout_s = timeout_s
        self._replicas = replicas
        self._check = check
        self._checked = False
        self._staged: list[_Request] = []
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] = self._loop.create_future()
        self._closed = False
        self._task = self._loop.create_task(self._run(), name="store-batcher")

    async def call(self, script: Script, keys: Sequence[str], *arguments: Argument) -> Reply:
        """The script's reply; the keys share a slot. Raises StoreUnavailable.

        Cancelling the caller does not take the call back.
        """
        if self._closed:
            raise StoreUnavailable("the store is closed")
        request = _Request(script, keys, arguments, self._loop.create_future())
        self._staged.append(request)
        self._go()
        return await request.reply

    async def register(self, scripts: Collection[Script]) -> None:
        """Load the scripts ahead of their first call. Raises StoreUnavailable."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._prepare()
                await self._load([Parcel(node, []) for node in self._lines.nodes()], scripts)
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            raise StoreUnavailable(_no_answer(str(error) or f"within {self._timeout_s:g} s")) from error

    async def close(self) -> None:
        """End the task; calls that are still waiting get StoreUnavailable. Idempotent."""
        self._closed = True
        self._task.cancel()
        await asyncio.wait([self._task])
        _fail(self._staged, "the store was closed")

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
                    await self._prepare()
                    await self._round_trip(batch)
            except TimeoutError:
                await self._give_up(batch, f"no answer within {self._timeout_s:g} s")
            except asyncio.CancelledError:
                _fail(batch, "the store was closed")
                raise
            except Exception as error:  # whatever it is, the callers must learn of it and the task go on
                await self._give_up(batch, str(error) or type(error).__name__)

    async def _prepare(self) -> None:
        await self._lines.ready()
        if self._check is not None and not self._checked:
            await self._check()
            self._checked = True

    async def _give_up(self, batch: Sequence[_Request], reason: str) -> None:
        """What waits would only wait for the same: its callers hear of it now, however many they are."""
        waiting, self._staged = self._staged, []
        _fail([*batch, *waiting], reason)
        await self._doubt()

    async def _doubt(self) -> None:
        """Trust neither connections nor what is known of the servers."""
        self._checked = False
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._lines.reset()
        except (RedisError, OSError):
            return  # the connection was broken already

    async def _round_trip(self, batch: list[_Request]) -> None:
        unknown = await self._send(batch)
        if unknown:  # Redis was restarted or its scripts were flushed: those calls did nothing yet
            parcels = [Parcel(parcel.node, []) for parcel, _ in self._parcels(unknown)]
            await self._load(parcels, {request.script for request in unknown})
            for request in await self._send(unknown):
                _fail([request], "Redis does not keep scripts")

    async def _send(self, batch: Sequence[_Request]) -> list[_Request]:
        """Send in one round trip and hand out the replies; returns the requests whose script Redis does not know."""
        parcels = self._parcels(batch)
        await self._lines.send([parcel for parcel, _ in parcels])
        unknown: list[_Request] = []
        failed = sum(len(requests) for _, requests in parcels) < len(batch)
        for parcel, requests in parcels:
            shortfall = self._shortfall(parcel, len(requests))
            for request, reply in zip(requests, parcel.replies, strict=False):
                if isinstance(reply, NoScriptError):
                    unknown.append(request)
                elif request.script.writes and shortfall:
                    _fail([request], shortfall)
                else:
                    _resolve(request, reply)
                    failed = failed or _is_trouble(reply)
        if failed:
            await self._doubt()
        return unknown

    def _parcels(self, batch: Sequence[_Request]) -> list[tuple[Parcel, list[_Request]]]:
        """The requests by the server that they go to; those that nobody serves now have failed."""
        by_node: dict[str, tuple[Parcel, list[_Request]]] = {}
        for request in batch:
            try:
                node = self._lines.node_of(request.keys)
            except RedisError as error:
                _fail([request], str(error))
                continue
            parcel, requests = by_node.setdefault("" if node is None else node.name, (Parcel(node, []), []))
            parcel.commands.append(request.command)
            requests.append(request)
        for parcel, requests in by_node.values():
            if self._replicas and any(request.script.writes for request in requests):
                parcel.commands.append(("WAIT", self._replicas, int(WAIT_SHARE * self._timeout_s * 1000)))
        return list(by_node.values())

    def _shortfall(self, parcel: Parcel, requests: int) -> str:
        """Why the parcel's writes are not durable yet; empty if they are."""
        if len(parcel.replies) == requests:
            return ""
        answer = parcel.replies[-1]
        if isinstance(answer, int) and answer >= self._replicas:
            return ""
        many = f"{answer} of" if isinstance(answer, int) else f"({answer}) not all of"
        return f"{many} {self._replicas} replicas have acknowledged the write"

    async def _load(self, parcels: Sequence[Parcel], scripts: Collection[Script]) -> None:
        for parcel in parcels:
            parcel.commands = [("SCRIPT LOAD", script.source) for script in scripts]
        await self._lines.send(parcels)
        for parcel in parcels:
            for reply in parcel.replies:
                if isinstance(reply, Exception):
                    raise reply


def _is_trouble(reply: object) -> bool:
    """It says that the server is gone, or is not the one to ask, rather than what is wrong with one call."""
    if isinstance(reply, AskError | ClusterError) or (isinstance(reply, ResponseError) and READ_ONLY in str(reply)):
        return True
    return isinstance(reply, RedisError | OSError) and not isinstance(reply, ResponseError)


def _resolve(request: _Request, reply: object) -> None:
    """Hand the reply to its caller."""
    if request.reply.done():  # its caller was cancelled
        return
    if isinstance(reply, list):
        request.reply.set_result(reply)
    elif isinstance(reply, RedisError | OSError) and not isinstance(reply, ResponseError):
        request.reply.set_exception(StoreUnavailable(_no_answer(str(reply))))
    else:
        what = reply if isinstance(reply, ResponseError) else f"unexpected reply {reply!r}"
        request.reply.set_exception(StoreUnavailable(f"the session log refused: {what}"))


def _fail(batch: Sequence[_Request], reason: str) -> None:
    for request in batch:
        if not request.reply.done():
            request.reply.set_exception(StoreUnavailable(_no_answer(reason)))


def _no_answer(reason: str) -> str:
    return f"the session log does not answer: {reason}"
