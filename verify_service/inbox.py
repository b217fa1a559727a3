"""The engine's queue of commands, which knows how much work waits in it."""

from __future__ import annotations

import threading
from queue import SimpleQueue

from verify_service.commands import Command


class Inbox:
    """A queue for one reader. `weight`: of what waits; see `weight` of the commands."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Command] = SimpleQueue()
        self._lock = threading.Lock()
        self._weight = 0

    @property
    def weight(self) -> int:
        return self._weight

    def put(self, command: Command) -> None:
        """From any thread; never blocks."""
        self._add(command.weight)
        self._queue.put(command)

    def get(self, timeout: float) -> Command:
        """Raises `queue.Empty` after `timeout` seconds."""
        command = self._queue.get(timeout=timeout)
        self._add(-command.weight)
        return command

    def empty(self) -> bool:
        return self._queue.empty()

    def _add(self, weight: int) -> None:
        with self._lock:
            self._weight += weight
