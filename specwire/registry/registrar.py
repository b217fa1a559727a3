"""Keeps one service in the registry: a heartbeat until it stops."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace

from specwire.registry.directory import Directory, RegistryUnavailable
from specwire.registry.entry import NO_LOAD, Load, ServiceEntry, ServiceState

logger = logging.getLogger(__name__)

# Seconds between heartbeats, and for which one holds: two may be lost.
HEARTBEAT_S = 2.0
TTL_S = 3 * HEARTBEAT_S
# Seconds for a stopping service's last message: it does not wait longer for Redis.
FAREWELL_S = 1.0
# Each wait is shortened by up to this part of it, so that a fleet that started together does not speak together.
SCATTER = 0.2


@dataclass(frozen=True, slots=True)
class HeartbeatTimes:
    """Seconds between heartbeats, and for which one holds."""

    every_s: float = HEARTBEAT_S
    ttl_s: float = TTL_S


HEARTBEAT_TIMES = HeartbeatTimes()


def new_id() -> str:
    """A random id for a service that starts."""
    return secrets.token_hex(16)


class Registrar:
    """Registers a service and its load. The service does not depend on Redis' answer.

    Args:
        directory: owned from now on; None registers nowhere.
        describe: the service as it is now, its state and beat apart.
    """

    def __init__(
        self,
        directory: Directory | None,
        describe: Callable[[], ServiceEntry],
        times: HeartbeatTimes = HEARTBEAT_TIMES,
    ) -> None:
        self._directory = directory
        self._describe = describe
        self._times = times
        self._state = ServiceState.SERVING
        self._beat = 0
        self._speaking = asyncio.Lock()
        self._trouble = ""
        self._random = random.Random()  # libraries seed the global one, all replicas alike
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """The first heartbeat is sent at once, and not waited for."""
        if self._directory is not None:
            self._task = asyncio.create_task(self._run(self._directory), name="registrar")

    @property
    def registers(self) -> bool:
        """Whether anybody is to be told."""
        return self._task is not None

    async def drain(self) -> None:
        """The service is about to stop: say so now."""
        self._state = ServiceState.DRAINING
        if self._task is not None and self._directory is not None:
            await self._soon(self._say(self._directory))

    async def close(self) -> None:
        """The service has stopped. Idempotent."""
        task, self._task = self._task, None
        if task is None or self._directory is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self._soon(self._leave(self._directory))
        await self._directory.close()

    async def _soon(self, saying: Coroutine[None, None, None]) -> None:
        try:
            async with asyncio.timeout(FAREWELL_S):
                await saying
        except TimeoutError:
            return  # the last heartbeat expires

    async def _run(self, directory: Directory) -> None:
        while True:
            try:
                await self._say(directory)
            except Exception:  # a bug of ours: the next heartbeat may work, and without any the entry expires
                logger.exception("a heartbeat failed")
            await asyncio.sleep(self._times.every_s * self._random.uniform(1 - SCATTER, 1))

    async def _say(self, directory: Directory) -> None:
        async with self._speaking:  # what is said later must be heard later
            self._beat += 1
            entry = replace(self._describe(), state=self._state, beat=self._beat)
            try:
                await directory.put(entry, self._times.ttl_s)
            except RegistryUnavailable as error:
                self._note(str(error))
            else:
                self._note("")

    async def _leave(self, directory: Directory) -> None:
        async with self._speaking:
            try:
                await directory.remove(self._describe().id)
            except RegistryUnavailable as error:
                self._note(str(error))

    def _note(self, trouble: str) -> None:
        if trouble and not self._trouble:
            logger.warning("not registered: %s", trouble)
        elif self._trouble and not trouble:
            logger.info("registered again")
        self._trouble = trouble


class LoadReader:
    """Where a service's load is read. `read` is set by the thread that makes what knows it."""

    def __init__(self) -> None:
        self.read: Callable[[], Load] = lambda: NO_LOAD
