"""One direction of a call over the simulated network: in order or not at all, and no more than is read."""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import Context
from typing import Any

from tests.simulation.loop import SimLoop
from tests.simulation.network import Line

# Messages that may be under way or unread in one direction.
WINDOW = 8


class Pipe:
    """One direction of a call. `read` belongs to one strand, `write` to another.

    Invariant: once `error` is set nothing more arrives.
    """

    def __init__(self, loop: SimLoop, line: Line, target: Context) -> None:
        self._loop = loop
        self._line = line
        self._target = target
        self._arrived: deque[Any] = deque()
        self._under_way = 0
        self._last = self.held_until = 0.0
        self.error: BaseException | None = None
        self._refusal: BaseException | None = None
        self._changed: list[asyncio.Future[None]] = []

    async def write(self, item: Any) -> None:
        while self._refusal is None and self._under_way + len(self._arrived) >= WINDOW:
            await self._change()
        if self._refusal is not None:
            raise self._refusal
        self.push(item)

    def push(self, item: Any) -> None:
        self._last = max(self._last + 1e-9, self.held_until, self._line.arrival(self._loop.time()))
        self._under_way += 1
        self._loop.call_at(self._last, self._arrive, item, context=self._target)

    def _arrive(self, item: Any) -> None:
        self._under_way -= 1
        if self.error is None:
            self._arrived.append(item)
        self._wake()

    async def read(self) -> Any:
        while not self._arrived:
            if self.error is not None:
                raise self.error
            await self._change()
        item = self._arrived.popleft()
        self._wake()
        if isinstance(item, BaseException):
            self.error = self._refusal = item
            raise item
        return item

    def fail(self, reader: BaseException, writer: BaseException) -> None:
        """What has arrived may still be read; nothing more comes."""
        if self.error is None:
            self.error, self._refusal = reader, writer
        self._wake()

    def refuse(self, writer: BaseException) -> None:
        """Nothing more can be written; what was may still arrive."""
        self._refusal = self._refusal or writer
        self._wake()

    async def _change(self) -> None:
        changed = self._loop.create_future()
        self._changed.append(changed)
        await changed

    def _wake(self) -> None:
        waiting, self._changed = self._changed, []
        for each in waiting:
            if not each.done():
                each.set_result(None)
