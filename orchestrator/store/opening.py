"""From a URL and a level of durability to a session log that answers."""

from __future__ import annotations

from orchestrator.store.base import SessionStore
from orchestrator.store.durability import durability_of
from orchestrator.store.errors import StoreUnavailable, UnfitStore
from orchestrator.store.memory import MemoryStore
from orchestrator.store.redis import RedisStore
from specwire.core.sampling import InvalidParameter
from specwire.redis.urls import MEMORY, InvalidUrl, lines_of, without_password

__all__ = ["MEMORY", "open_store", "without_password"]


async def open_store(url: str | None, timeout_s: float = 2.0, durability: str = "") -> SessionStore:
    """The log at `url` (see `specwire.redis.urls`); "memory:" or None keeps it in this process.

    durability: a level's name (see `orchestrator.store.durability`); "" takes the plain one of where the log is.

    Raises:
        StoreUnavailable: not such a URL, nothing answers there, or not as the level needs it; the message names the
            option and shows the URL without its password.
    """
    in_memory = url is None or url == MEMORY
    try:
        level = durability_of(durability, in_memory)
        if url is None or in_memory:
            return MemoryStore()
        lines = lines_of(url, timeout_s)
    except (InvalidParameter, InvalidUrl) as error:
        raise StoreUnavailable(str(error)) from error
    store = RedisStore(lines, timeout_s, level)
    try:
        await store.register()
    except UnfitStore as error:
        await store.close()
        raise StoreUnavailable(f"{error}: {without_password(url)}", error.detail) from error
    except StoreUnavailable as error:
        await store.close()
        raise StoreUnavailable(f"redis-url: cannot use {without_password(url)}: {error.detail or error}") from error
    return store
