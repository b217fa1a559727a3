"""The session log of a soak: a Redis whose file brings back what it has acknowledged."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import redis

from bench.runs import BenchError
from bench.soak.service import START_LIMIT_S, Process
from deploy.stack.redis_server import find_redis

PING_EVERY_S = 0.05


class RedisLog(Process):
    """redis-server on a TCP port, for relays. It writes to its file before it answers, so SIGKILL loses nothing."""

    def __init__(self, folder: Path) -> None:
        self._port = free_port()
        self.address = f"127.0.0.1:{self._port}"
        settings = {
            "bind": "127.0.0.1",
            "port": str(self._port),
            "dir": str(folder),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "loglevel": "warning",
            "logfile": str(folder / "redis.log"),
            "maxmemory-policy": "noeviction",
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        super().__init__([find_redis(), *words], os.environ, folder / "redis.stderr")

    def ready(self) -> str:
        """Wait until it answers, which it does once its file is read."""
        deadline = time.monotonic() + START_LIMIT_S
        with redis.Redis(port=self._port, socket_timeout=1.0) as client:
            while time.monotonic() < deadline and self.lives:
                try:
                    client.ping()
                    return self.address
                except redis.RedisError:
                    time.sleep(PING_EVERY_S)
        raise BenchError(f"redis-server at {self.address} did not become ready")

    def held_bytes(self) -> int:
        """What its allocator has given out for keys, buffers and clients.

        Keys that have expired are freed when they are met. By itself Redis meets few of them among many that have not
        (a tenth of all may be stale); a scan meets all, as a collection does in the processes of Python.
        """
        with redis.Redis(port=self._port, socket_timeout=10.0) as client:
            for _ in client.scan_iter(count=1000):
                pass
            return int(client.info("memory")["used_memory"])

    def eternal_keys(self) -> list[str]:
        """Keys that nothing would ever remove."""
        with redis.Redis(port=self._port, socket_timeout=10.0) as client:
            return sorted(_eternal(client))


def _eternal(client: redis.Redis) -> Iterator[str]:
    for key in client.scan_iter(count=1000):
        if client.ttl(key) == -1:
            yield key.decode(errors="replace")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
