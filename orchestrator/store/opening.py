"""From a URL to a session log that answers."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from orchestrator.store.base import SessionStore, StoreUnavailable
from orchestrator.store.memory import MemoryStore
from orchestrator.store.redis import RedisStore

MEMORY = "memory:"
SCHEMES = ("redis://", "rediss://", "unix://")


async def open_store(url: str | None, timeout_s: float = 2.0) -> SessionStore:
    """The log at `url`: redis://, rediss:// or unix://; "memory:" or None keeps it in this process.

    Raises:
        StoreUnavailable: not such a URL, or nothing answers there; the message names the URL without its password.
    """
    if url is None or url == MEMORY:
        return MemoryStore()
    store = RedisStore(_client(url, timeout_s), timeout_s)
    try:
        await store.register()
    except StoreUnavailable as error:
        await store.close()
        raise StoreUnavailable(f"redis-url: cannot use {without_password(url)}: {error}") from error
    return store


def _client(url: str, timeout_s: float) -> Redis:
    """Answers in bytes. Does not retry: only the caller knows what an unknown outcome means for it."""
    if not url.startswith(SCHEMES):
        raise StoreUnavailable(f"redis-url: {without_password(url)!r} is none of {', '.join(SCHEMES)} or {MEMORY}")
    try:
        return Redis.from_url(
            url,
            decode_responses=False,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as error:
        raise StoreUnavailable(f"redis-url: {without_password(url)} is no Redis URL: {error}") from error


def without_password(url: str) -> str:
    """The URL as it may be shown: without password, and without the query, which may hold one too."""
    scheme, separator, rest = url.partition("?")[0].rpartition("://")
    credentials, at, place = rest.rpartition("@")
    user, colon, _ = credentials.partition(":")
    return f"{scheme}{separator}{user}{':***' if colon else ''}{at}{place}"
