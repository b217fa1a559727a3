"""How commands reach Redis: one server (also the one that Sentinels name), or a cluster's by the key's slot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from redis.asyncio import Redis
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, ClusterError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

Argument = str | int | bytes
Command = tuple[Argument, ...]
# HOST:PORT of a cluster's server; empty where there is only one.
Node = str
ONLY_NODE: Node = ""
Address = tuple[str, int]
# In the answer of a server that has become a replica.
READ_ONLY = "READONLY"


class RedisConnection(Protocol):
    """Raises RedisError and OSError, TimeoutError among them. Nothing is repeated here.

    `known`: which servers there are. If not, `ready` is to be awaited before `node_of` and `nodes`.
    """

    @property
    def known(self) -> bool: ...

    async def ready(self) -> None: ...

    def node_of(self, keys: Sequence[str]) -> Node:
        """The server that holds the keys, which share a slot; without keys any. Raises RedisError if none does."""
        ...

    def nodes(self) -> Sequence[Node]:
        """All servers that hold keys."""
        ...

    async def send(self, node: Node, commands: Sequence[Command]) -> list[object]:
        """One round trip over one connection, in order; a reply to each, errors of single ones among them."""
        ...

    async def reset(self, node: Node) -> None:
        """Forget a server that did not answer, or is the wrong one: connect and look for servers again."""
        ...

    async def close(self) -> None: ...


class ServerConnection:
    """Args: sentinel: names the client's server; None where the server is given. Both are closed here."""

    known = True

    def __init__(self, client: Redis, sentinel: Sentinel | None = None) -> None:
        self._client = client
        self._sentinel = sentinel

    async def ready(self) -> None:
        return

    def node_of(self, keys: Sequence[str]) -> Node:
        return ONLY_NODE

    def nodes(self) -> Sequence[Node]:
        return [ONLY_NODE]

    async def send(self, node: Node, commands: Sequence[Command]) -> list[object]:
        return await exchange(self._client, commands)

    async def reset(self, node: Node) -> None:
        await self._client.connection_pool.disconnect()

    async def close(self) -> None:
        await self._client.aclose()
        for sentinel in self._sentinel.sentinels if self._sentinel is not None else ():
            await sentinel.aclose()


class ClusterConnection:
    """Each server has a client of its own, independent of the others.

    Args:
        seeds: some of the servers. Any of them can name the others, and who has which slots.
        client_of: a client for an address; nothing is connected yet.
    """

    def __init__(self, seeds: Sequence[Address], client_of: Callable[[Address], Redis]) -> None:
        self._client_of = client_of
        self._clients = {_name(seed): client_of(seed) for seed in seeds}
        self._ranges: list[tuple[int, int, Node]] = []
        self._discovery = asyncio.Lock()
        self.known = False

    async def ready(self) -> None:
        async with self._discovery:
            if not self.known:
                self._ranges = await self._ask_around()
                self.known = True

    async def _ask_around(self) -> list[tuple[int, int, Node]]:
        """Which server has which slots, by the first that answers: a lost or silent one holds nobody up."""
        asked = [asyncio.ensure_future(self._slots(node)) for node in self._clients]
        last: RedisError | OSError = ClusterDownError("no server is known")
        try:
            for answer in asyncio.as_completed(asked):
                try:
                    return await answer
                except (RedisError, OSError) as error:
                    last = error
            raise last
        finally:
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _slots(self, node: Node) -> list[tuple[int, int, Node]]:
        # In two words, because redis-py parses the answer to the one-word command in its own way.
        (answer,) = await exchange(self._clients[node], [("CLUSTER", "SLOTS")])
        if isinstance(answer, Exception):
            raise answer
        ranges = []
        for first, last, primary, *_ in cast(list[list[object]], answer):
            host, port = cast("list[bytes | int]", primary)[:2]
            ranges.append((cast(int, first), cast(int, last), self._met(cast(bytes, host), cast(int, port), node)))
        if not ranges:
            raise ClusterDownError(f"{node} serves no slots")
        return ranges

    def _met(self, host: bytes, port: int, told_by: Node) -> Node:
        """The server's name; one that does not know its own address is where it was asked."""
        address = host.decode() if host else told_by.rpartition(":")[0], port
        if _name(address) not in self._clients:
            self._clients[_name(address)] = self._client_of(address)
        return _name(address)

    def node_of(self, keys: Sequence[str]) -> Node:
        slot = key_slot(keys[0].encode()) if keys else self._ranges[0][0]
        for first, last, node in self._ranges:
            if first <= slot <= last:
                return node
        raise ClusterDownError(f"nobody serves slot {slot}")

    def nodes(self) -> Sequence[Node]:
        return sorted({node for _, _, node in self._ranges})

    async def send(self, node: Node, commands: Sequence[Command]) -> list[object]:
        return await exchange(self._clients[node], commands)

    async def reset(self, node: Node) -> None:
        self.known = False
        await self._clients[node].connection_pool.disconnect()

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()


def _name(address: Address) -> Node:
    host, port = address
    return f"{host}:{port}"


async def exchange(client: Redis, commands: Sequence[Command]) -> list[object]:
    """Send the commands in one pipeline; their replies, errors among them.

    redis-py sends by `asyncio.wait_for`, in which Python 3.11 forgets a cancellation that comes as the sending is done
    (python/cpython#86296): a task that polls would never end, nor would anything that waits for it.
    """
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        return cast("list[object]", await pipeline.execute(raise_on_error=False))
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError


def is_silence(error: BaseException | None) -> bool:
    """Whether an error means that no answer came in time. That of Sentinels is told in words alone."""
    if isinstance(error, MasterNotFoundError):
        return TimeoutError.__name__ in str(error)
    return isinstance(error, TimeoutError | RedisTimeoutError)


def is_trouble(reply: object) -> bool:
    """Whether an error means that the server is gone or is not the one to ask, rather than that one call is wrong."""
    if isinstance(reply, AskError | ClusterError) or (isinstance(reply, ResponseError) and READ_ONLY in str(reply)):
        return True
    return isinstance(reply, RedisError | OSError) and not isinstance(reply, ResponseError)
