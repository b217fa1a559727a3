"""The resident and the held memory of a load's processes, and its samples."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import redis

from bench.harness.runs import BenchError
from bench.harness.services import Process, RedisLog
from bench.soak_load.weighing import weigh

# Seconds, tokens so far, sessions that run, sessions that have ended, resident MiB by process.
Sample = tuple[float, int, int, int, dict[str, float]]
# While nothing was under way: sessions that have gone, MiB held, and MiB resident, by process.
Weight = tuple[int, dict[str, float], dict[str, float]]


class Memory:
    """`sockets`: where the services are weighed, by name; Redis tells by itself."""

    def __init__(self, parts: Mapping[str, Process], sockets: Mapping[str, Path], log: RedisLog) -> None:
        self.samples: list[Sample] = []
        self.weights: list[Weight] = []
        self._parts = parts
        self._sockets = sockets
        self._log = log

    def resident_mib(self) -> dict[str, float]:
        """Of each process."""
        page = os.sysconf("SC_PAGE_SIZE") / 2**20
        return {
            name: round(int(Path(f"/proc/{part.process.pid}/statm").read_text().split()[1]) * page, 1)
            for name, part in self._parts.items()
        }

    def held_mib(self) -> dict[str, float]:
        """Allocated and in use, of each process; holds the services up for a moment. BenchError without an answer."""
        try:
            held = {name: weigh(path) for name, path in self._sockets.items()}
            held["redis"] = self._log.held_bytes()
        except (OSError, redis.RedisError) as error:
            raise BenchError(f"memory: {error}") from error
        return {name: round(size / 2**20, 3) for name, size in held.items()}
