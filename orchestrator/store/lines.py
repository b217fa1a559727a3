"""How commands reach Redis: one server (also one that Sentinels name), or a cluster's nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.client import Pipeline
from redis.asyncio.cluster import ClusterNode, ClusterPipeline
from redis.asyncio.sentinel import Sentinel

Argument = str | int | bytes
Command = tuple[Argument, ...]


@dataclass(slots=True)
class Parcel:
    """Commands for one server, to be sent in order over one connection; afterwards their replies, errors among them."""

    node: ClusterNode | None
    commands: list[Command]
    replies: list[object] = field(default_factory=list)


class Lines(Protocol):
    """Raises RedisError and OSError, TimeoutError among them. Nothing is repeated here."""

    async def ready(self) -> None:
        """Know which servers there are."""
        ...

    def node_of(self, keys: Sequence[str]) -> ClusterNode | None:
        """Who holds the keys, which share a slot; None where there is but one server. Raises RedisError: nobody."""
        ...

    def nodes(self) -> Sequence[ClusterNode | None]:
        """All servers that hold keys."""
        ...

    async def send(self, parcels: Sequence[Parcel]) -> None:
        """Send all in one round trip and fill in the replies."""
        ...

    async def reset(self) -> None:
        """Something went wrong: connect anew, and look anew for who is there."""
        ...

    async def close(self) -> None: ...


class SingleLine:
    """Args: sentinel is whoever names the client's server, if somebody does; both are closed here."""

    def __init__(self, client: Redis, sentinel: Sentinel | None = None) -> None:
        self._client = client
        self._sentinel = sentinel

    async def ready(self) -> None:
        return

    def node_of(self, keys: Sequence[str]) -> ClusterNode | None:
        return None

    def nodes(self) -> Sequence[ClusterNode | None]:
        return [None]

    async def send(self, parcels: Sequence[Parcel]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for parcel in parcels:
            for command in parcel.commands:
                pipeline.execute_command(*command)
        await _execute(pipeline, parcels)

    async def reset(self) -> None:
        await self._client.connection_pool.disconnect()

    async def close(self) -> None:
        await self._client.aclose()
        for sentinel in self._sentinel.sentinels if self._sentinel is not None else ():
            await sentinel.aclose()


class ClusterLines:
    """Args: client does not retry; it is told to look for the cluster's nodes again after every failure.

    follow_moves: let it send a command again to the node that a slot has moved to, on a connection of its own.
    """

    def __init__(self, client: RedisCluster, follow_moves: bool) -> None:
        self._client = client
        self._follow_moves = follow_moves

    async def ready(self) -> None:
        await self._client.initialize()

    def node_of(self, keys: Sequence[str]) -> ClusterNode | None:
        return self._client.get_node_from_key(keys[0]) if keys else self._client.get_default_node()

    def nodes(self) -> Sequence[ClusterNode | None]:
        return self._client.get_primaries()

    async def send(self, parcels: Sequence[Parcel]) -> None:
        pipeline = self._client.pipeline()
        for parcel in parcels:
            for command in parcel.commands:
                pipeline.execute_command(*command, target_nodes=parcel.node)
        await _execute(pipeline, parcels, allow_redirections=self._follow_moves)

    async def reset(self) -> None:
        await self._client.aclose()

    async def close(self) -> None:
        await self._client.aclose()


async def _execute(pipeline: Pipeline | ClusterPipeline, parcels: Sequence[Parcel], **options: bool) -> None:
    replies = iter(await pipeline.execute(raise_on_error=False, **options))
    for parcel in parcels:
        parcel.replies = [next(replies) for _ in parcel.commands]
