"""How processes reach Redis, of which one server (also the one that Sentinels name) or a cluster is known by its URL.

redis://[USER:PASSWORD@]HOST[:PORT][/DB]                             one server; rediss:// with TLS
unix://[USER:PASSWORD@]PATH[?db=DB]                                  one server on a socket
redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,...]/SERVICE[/DB]      the primary that these Sentinels name; port 26379
redis+cluster://[USER:PASSWORD@]HOST[:PORT][,...]                    a cluster, found by any of these nodes

rediss+sentinel:// and rediss+cluster:// with TLS. What may follow a `?` is what redis-py takes there (ssl_ca_certs,
ssl_certfile, ssl_keyfile, ...), and for Sentinels that ask for it sentinel_username and sentinel_password. User and
password, an ACL user's, are percent-encoded.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar, cast

import msgspec
from redis.asyncio import Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, ClusterError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

# ----------------------------------------------------------------------------------------------------------------------
# How commands reach it: one server, or a cluster's by the key's slot.

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


# ----------------------------------------------------------------------------------------------------------------------
# From a URL to clients, and where a session log is.

FIELD = "redis-url"
MEMORY = "memory:"
FILE = "file:"
SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
REDIS_PORT, SENTINEL_PORT = 6379, 26379
SENTINEL_PREFIX = "sentinel_"


class InvalidUrl(ValueError):
    """Says which part of the URL is wrong, without its password."""


@dataclass(frozen=True, slots=True)
class _Url:
    """hosts, path and query are as written; `shown` is the whole without what is secret. field: of errors."""

    scheme: str
    credentials: str
    hosts: str
    path: str
    query: str
    shown: str
    field: str

    @classmethod
    def split(cls, url: str, field: str) -> _Url:
        scheme, separator, rest = url.partition("://")
        if not separator or scheme not in SCHEMES:
            also = f", {MEMORY} or {FILE}" if field == FIELD else ""
            raise InvalidUrl(f"{field}: {without_password(url)!r} begins with none of {', '.join(SCHEMES)}{also}")
        place, _, query = rest.partition("?")
        credentials, at, address = place.rpartition("@")
        hosts, _, path = address.partition("/")
        parts = cls(scheme, credentials + at, hosts, path, query, without_password(url), field)
        if any(special in credentials for special in "/@#[]") or "@" in query:
            parts.wrong("password", "percent-encode what is neither a letter nor a digit")
        return parts

    @property
    def encrypted(self) -> bool:
        return self.scheme.startswith("rediss")

    @property
    def kind(self) -> str:
        return self.scheme.partition("+")[2]

    def wrong(self, part: str, why: str) -> NoReturn:
        raise InvalidUrl(f"{self.field}: {part}: {why}: {self.shown}")

    def addresses(self, default_port: int) -> list[tuple[str, int]]:
        """(host, port) of every host; raises InvalidUrl."""
        return [self._address(text, default_port) for text in self.hosts.split(",")]

    def _address(self, text: str, default_port: int) -> tuple[str, int]:
        bracketed, bracket, behind = text.rpartition("]")
        host, colon, port = behind.partition(":")
        host = bracketed.removeprefix("[") if bracket else host
        if not host:
            self.wrong("host", "is empty")
        if not colon:
            return host, default_port
        if not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
            self.wrong("port", "must be from 1 to 65535")
        return host, int(port)

    def database(self, text: str) -> int:
        if text and not (text.isascii() and text.isdecimal()):
            self.wrong("database", "must be a number")
        return int(text or 0)

    def options(self) -> dict[str, Any]:
        """What redis-py makes of credentials and query, with `ssl` in place of a class of connections."""
        url = f"redis://{self.credentials}host" + (f"?{self.query}" if self.query else "")
        try:
            options = dict(parse_url(url))
        except ValueError as error:
            self.wrong("query", str(error))
        del options["host"]
        if self.encrypted:
            options["ssl"] = True
        return options


def connection_of(url: str, timeout_s: float, field: str = FIELD) -> RedisConnection:
    """Clients that answer in bytes and do not retry: only the caller knows what an unknown outcome means for it.

    field: the option that the URL came in, for errors. Nothing is connected yet. Raises InvalidUrl.
    """
    parts = _Url.split(url, field)
    bounds = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, "retry": Retry(NoBackoff(), 0)}
    try:
        match parts.kind:
            case "sentinel":
                return _sentinel(parts, bounds)
            case "cluster":
                return _cluster(parts, bounds)
            case _:
                return _single(parts, url, bounds)
    except (TypeError, RedisError) as error:
        parts.wrong("query", str(error))


def _single(parts: _Url, url: str, bounds: dict[str, Any]) -> RedisConnection:
    if parts.scheme == "unix":
        parts.options()
        return ServerConnection(Redis.from_url(url, **bounds))
    parts.addresses(REDIS_PORT)
    if "," in parts.hosts:
        parts.wrong("host", "several are for redis+sentinel:// and redis+cluster://")
    parts.database(parts.path)
    parts.options()
    return ServerConnection(Redis.from_url(url, **bounds))


def _sentinel(parts: _Url, bounds: dict[str, Any]) -> RedisConnection:
    service, _, database = parts.path.partition("/")
    if not service:
        parts.wrong("service", "is missing, as in redis+sentinel://HOST:PORT/SERVICE")
    sentinels, options = parts.addresses(SENTINEL_PORT), parts.options()
    options.setdefault("db", parts.database(database))
    own = {name: options.pop(name) for name in list(options) if name.startswith(SENTINEL_PREFIX)}
    asked = {name.removeprefix(SENTINEL_PREFIX): value for name, value in own.items()}
    tls = {name: value for name, value in options.items() if name.startswith("ssl")}
    # One after the other is asked within the time that there is for all.
    each = bounds["socket_timeout"] / (len(sentinels) + 1)
    patience = {**bounds, "socket_timeout": each, "socket_connect_timeout": each}
    kwargs = {**patience, **tls, **asked}
    sentinel = Sentinel(sentinels, sentinel_kwargs=kwargs, **bounds)  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
    return ServerConnection(sentinel.master_for(service, redis_class=Redis, **options), sentinel)


def _cluster(parts: _Url, bounds: dict[str, Any]) -> RedisConnection:
    if parts.path and parts.database(parts.path):
        parts.wrong("database", "a cluster has only 0")
    options = {**parts.options(), **bounds}
    return ClusterConnection(parts.addresses(REDIS_PORT), lambda at: Redis(host=at[0], port=at[1], **options))


def place_of(url: str) -> str:
    """Where a session log's URL leads: memory, file or redis."""
    if url == MEMORY:
        return "memory"
    return "file" if url.startswith(FILE) else "redis"


def path_of(url: str) -> Path:
    """The file that `file:PATH` or `file:///PATH` names. Raises InvalidUrl."""
    path = url.removeprefix(FILE)
    if path.startswith("//"):
        host, _, path = path[2:].partition("/")
        if host:
            raise InvalidUrl(f"{FIELD}: host: a file is on this machine, as in file:PATH: {url}")
        path = f"/{path}"
    if not path or path.endswith("/") or "\0" in path:
        raise InvalidUrl(f"{FIELD}: path: must name a file, as in file:PATH, not {url!r}")
    return Path(path)


def without_password(url: str) -> str:
    """The URL as it may be shown: without password, and without the query, which may hold one too."""
    if url.startswith(FILE):
        return url
    place, _, query = url.partition("?")
    scheme, separator, rest = place.rpartition("://")
    if "@" in query:  # the question mark may be the password's
        return f"{scheme}{separator}***"
    credentials, at, place = rest.rpartition("@")
    user, colon, _ = credentials.partition(":")
    return f"{scheme}{separator}{user}{':***' if colon else ''}{at}{place}"


# ----------------------------------------------------------------------------------------------------------------------
# JSON in Redis. Anybody who can write there can write anything, so every value is checked.

T = TypeVar("T")

# How msgspec tells where a value stands: `$.models[0].name`.
PLACE = re.compile(r"(.*) - at `\$\.?(.*)`", re.DOTALL)
STEP = re.compile(r"\w+")


def decoded(data: bytes, kind: type[T]) -> T:
    """The value of that type. Fields that it does not have are left out.

    Raises:
        ValueError: names the field and what it holds.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        placed = PLACE.fullmatch(str(error))
        if placed is None:
            raise ValueError(str(error)) from None
        message, field = placed.groups()
        raise ValueError(f"{field}: {message[0].lower()}{message[1:]}{_held(data, field)}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _held(data: bytes, field: str) -> str:
    try:
        value = json.loads(data)
        for step in STEP.findall(field):
            value = value[int(step) if isinstance(value, list) else step]
        return f", not {value!r:.80}"
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""  # what comes behind is no JSON, or the field stands there twice
