"""The drafter's thread: commands in, proposals out, one token of every session in between.

It owns the model. The event loop puts commands into a queue, which wakes it at once; it looks into the queue again
before every token, so that an advance that contradicts a chain takes effect at the next token.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from draft_service.commands import Command
from specwire.telemetry.metrics import SIZES, STEPS, Histogram

# ----------------------------------------------------------------------------------------------------------------------
# What a drafter counts: plain numbers, written in its thread only, which metrics read from elsewhere.

# How many positions the share of late ones tells of, about: what is older weighs ever less.
REMEMBERED_PASSES = 256


class DrafterTally:
    """Since the drafter began. drafted: tokens drawn; proposed: those that went out in proposals.

    due: decided positions within the run-ahead; late: those of them for which nothing had been proposed.
    misses: the share of late ones of late.
    """

    def __init__(self) -> None:
        self.forward_s = Histogram(STEPS)
        self.rows = Histogram(SIZES)
        self.drafted = 0
        self.proposed = 0
        self.rollbacks = 0
        self.opened = 0
        self.due = 0
        self.late = 0
        self.misses = 0.0
        self.refused: Counter[str] = Counter()

    def step(self, spent_ns: int, rows: int, drawn: int) -> None:
        """A forward has ended."""
        self.forward_s.observe(spent_ns / 1e9)
        self.rows.observe(rows)
        self.drafted += drawn

    def advance(self, due: int, late: int) -> None:
        """A session was told what is decided."""
        self.due += due
        self.late += late
        if due:
            kept = (1 - 1 / REMEMBERED_PASSES) ** due
            self.misses = self.misses * kept + late / due * (1 - kept)


log = logging.getLogger(__name__)

STOP_LIMIT = 10.0
# A start that is given up: what loads may be in the middle of it.
GIVE_UP_LIMIT = 3.0
LAST_MOMENT_S = 1.0

Info = TypeVar("Info")
T = TypeVar("T")


class Book(Protocol):
    """What the thread drives: `draft_service.sessions.Sessions`, which needs torch where this module does not."""

    @property
    def wanting(self) -> bool: ...

    def apply(self, command: Command) -> None: ...

    def step(self) -> None: ...

    def deliver(self) -> None: ...


class Drafter(Generic[Info]):
    """A thread that loads a model, then drafts until it is stopped.

    Args:
        load: run in the thread, because the number of CPU threads is a property of the thread that sets it; returns
            the sessions and a description of the model.
    """

    def __init__(self, load: Callable[[], tuple[Book, Info]]) -> None:
        self._load = load
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        # A daemon: a forward that hangs beyond `stop` must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="drafter", daemon=True)
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Info] = self._loop.create_future()
        self._ended: asyncio.Future[str] = self._loop.create_future()
        self._stopping = False

    async def start(self) -> Info:
        """The model's description once it is loaded. Cancelled, it returns when the thread has ended, or at a limit.

        Raises:
            Exception: whatever `load` raised.
        """
        self._thread.start()
        try:
            return await asyncio.shield(self._ready)
        except asyncio.CancelledError:
            self._ask_to_stop()
            await self._until_ended(GIVE_UP_LIMIT)
            self._ready.cancel()
            raise

    def send(self, command: Command) -> None:
        self._commands.put(command)

    @property
    def backlog(self) -> int:
        """Commands that wait."""
        return self._commands.qsize()

    async def failed(self) -> str:
        """Return, with the reason, when the thread has ended without being asked to."""
        reason = await asyncio.shield(self._ended)
        if self._stopping:
            await asyncio.Event().wait()
        return reason

    async def stop(self) -> None:
        """End the thread after the forward under way. Idempotent."""
        self._ask_to_stop()
        await self._until_ended(STOP_LIMIT)

    async def _until_ended(self, limit_s: float) -> None:
        done, _ = await asyncio.wait({self._ended}, timeout=limit_s)
        if done:
            # To say so was its last act: it needs but a moment to be gone.
            self._thread.join(LAST_MOMENT_S)

    def _ask_to_stop(self) -> None:
        self._stopping = True
        self._commands.put(None)

    # In the thread

    def _run(self) -> None:
        reason = "stopped"
        try:
            book, info = self._load()
        except BaseException as error:
            self._tell(self._fail_start, error)
            self._tell(_settle, self._ended, reason)
            return
        self._tell(_settle, self._ready, info)
        try:
            self._serve(book)
        except Exception as error:
            log.exception("the drafter's thread failed")
            reason = f"the drafter failed: {type(error).__name__}: {error}"
        self._tell(_settle, self._ended, reason)

    def _serve(self, book: Book) -> None:
        while self._take_commands(book):
            book.step()
            book.deliver()

    def _take_commands(self, book: Book) -> bool:
        """Apply what waits, and wait if there is nothing else to do; False once asked to stop."""
        while not self._commands.empty() or not book.wanting:
            command = self._commands.get()
            if command is None:
                return False
            book.apply(command)
            if self._commands.empty():
                book.deliver()
        return True

    def _tell(self, report: Callable[..., object], *args: object) -> None:
        """Report to the event loop, unless it is gone."""
        try:
            self._loop.call_soon_threadsafe(report, *args)
        except RuntimeError:
            log.debug("the event loop closed before the drafter's thread ended")

    # In the event loop

    def _fail_start(self, error: BaseException) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)
