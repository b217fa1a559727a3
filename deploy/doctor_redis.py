"""The session log: a server to start, or the one at a URL and how it is configured."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from deploy.findings import Finding, bad, ok, warn
from deploy.options import StackError
from deploy.redis_server import OLDEST, find_redis, parsed, version_of
from orchestrator.store import StoreUnavailable, open_store
from orchestrator.store.opening import MEMORY, without_password
from specwire.redis.urls import lines_of

LIMIT_S = 5.0
# Releases of each line since which a script cannot run code in the server (CVE-2025-49844). Later lines began with it.
MENDED: dict[tuple[int, ...], int] = {(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2}
SETTINGS = [("INFO",), ("CONFIG GET", "save")]


async def check_log(url: str | None, durability: str) -> list[Finding]:
    """None: a private server is started by `up` and `generate`."""
    if url is None:
        return await _check_own()
    if url == MEMORY:
        return [warn("redis", "memory: the log is lost with its process", "give a Redis by --redis-url for more")]
    try:
        store = await open_store(url, LIMIT_S, durability)
    except StoreUnavailable as error:
        return [bad("redis", str(error), "start Redis there, or mend the URL or the level of durability")]
    await store.close()
    return [ok("redis", f"{without_password(url)} answers, durability {store.durability}"), *await _settings(url)]


async def _check_own() -> list[Finding]:
    try:
        server = await asyncio.to_thread(find_redis)
    except StackError as error:
        remedy = "pip install 'specwire[embedded-redis]', or --redis-url URL"
        return [bad("redis", f"no private server: {error}", remedy)]
    version = await asyncio.to_thread(version_of, server)
    shown = ".".join(map(str, version)) or "of unknown version"
    return [ok("redis", f"private server {shown}: {server}"), *_holes(version)]


def _holes(version: tuple[int, ...]) -> Iterator[Finding]:
    """Versions say what was released, not what a distribution has mended in its own build."""
    line, patch = version[:2], version[2:3]
    if version and line <= max(MENDED) and patch < (MENDED.get(line, math.inf),):
        text = f"version {'.'.join(map(str, version))} lets a script run code in the server (CVE-2025-49844)"
        since = ", ".join(f"{major}.{minor}.{at}" for (major, minor), at in MENDED.items())
        yield warn("redis", text, f"put a redis-server on PATH that is mended ({since}, or by your distribution)")


async def _settings(url: str) -> list[Finding]:
    """Of every server behind the URL."""
    lines = lines_of(url, LIMIT_S)
    try:
        async with asyncio.timeout(LIMIT_S):
            await lines.ready()
            answers = [await lines.send(node, SETTINGS) for node in lines.nodes()]
    except Exception as error:  # whatever the driver makes of a server that just answered and does not now
        return [
            warn("redis", f"its settings cannot be read: {error}", "see docs/SESSION_LOG.md for what they should be")
        ]
    finally:
        with suppress(Exception):
            await lines.close()
    return [finding for info, saves in answers if isinstance(info, dict) for finding in judge(info, _saves(saves))]


def _saves(answer: object) -> bool | None:
    """Whether snapshots are written; None where CONFIG is not allowed."""
    if not isinstance(answer, dict):
        return None
    return any(bool(value) for value in answer.values())


def judge(info: Mapping[str, Any], saves: bool | None) -> Iterator[Finding]:
    """What a server's INFO says about keeping logs."""
    found = str(info.get("redis_version", "0"))
    if parsed(found)[:2] < OLDEST:
        yield warn("redis", f"version {found} is not tested", "use 6.2 or newer")
    else:
        yield ok("redis", f"version {found}")
        if "valkey_version" not in info:  # it goes by numbers of its own
            yield from _holes(parsed(found))
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        remedy = "CONFIG SET maxmemory-policy noeviction"
        yield warn("redis", f"maxmemory-policy {policy}: short of memory it drops sessions that run", remedy)
    if not info.get("aof_enabled") and saves is not True:
        certain = "writes nothing to disk" if saves is False else "has no append-only file"
        yield warn("redis", f"{certain}: its restart may lose sessions", "CONFIG SET appendonly yes")
