"""From a URL to clients of Redis, and where a session log is.

redis://[USER:PASSWORD@]HOST[:PORT][/DB]                             one server; rediss:// with TLS
unix://[USER:PASSWORD@]PATH[?db=DB]                                  one server on a socket
redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,...]/SERVICE[/DB]      the primary that these Sentinels name; port 26379
redis+cluster://[USER:PASSWORD@]HOST[:PORT][,...]                    a cluster, found by any of these nodes

rediss+sentinel:// and rediss+cluster:// with TLS. What may follow a `?` is what redis-py takes there (ssl_ca_certs,
ssl_certfile, ssl_keyfile, ...), and for Sentinels that ask for it sentinel_username and sentinel_password. User and
password, an ACL user's, are percent-encoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from redis.asyncio import Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from specwire.redis.connection import ClusterConnection, RedisConnection, ServerConnection

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
