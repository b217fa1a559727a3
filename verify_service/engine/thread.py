"""The engine's thread, its clock and its queue of commands: it loads and measures the model, then runs steps."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from verify_service.engine.messages import Command, Reports, Stop
from verify_service.ranks import Ranks

# ----------------------------------------------------------------------------------------------------------------------
# The clock of the service: the machine's monotonic one, in microseconds, for the event loop and the engine alike.


def monotonic_us() -> float:
    return time.monotonic_ns() / 1000


# ----------------------------------------------------------------------------------------------------------------------
# The engine's queue of commands, which knows how much work waits in it.


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


# ----------------------------------------------------------------------------------------------------------------------
# The engine's thread: loads the model, measures it, then runs the engine until it is stopped.
#
# The model is loaded in the thread that computes with it, because the number of CPU threads belongs to the thread that
# sets it.

logger = logging.getLogger(__name__)

STOP_LIMIT_S = 10.0
# A start that is given up: what loads may be in the middle of it.
GIVE_UP_LIMIT_S = 3.0
# A step that takes longer than this hangs.
STEP_LIMIT_S = 60.0
# Between the thread's last words and its end.
JOIN_S = 1.0

Info = TypeVar("Info")
T = TypeVar("T")


class Runnable(Protocol):
    """What the thread drives: `verify_service.engine.engine.Engine`, which needs torch where this module does not."""

    @property
    def inbox(self) -> Inbox: ...

    @property
    def step_began_s(self) -> float | None:
        """When the step under way began, by `time.monotonic`; None between steps."""
        ...

    def run(self) -> None: ...


Deliver = Callable[[Reports], None]
GoOn = Callable[[], None]
Load = Callable[[Deliver, GoOn], tuple[Runnable, Info]]


class StartGivenUp(Exception):
    """The worker was asked to stop while it loaded."""


class Worker(Generic[Info]):
    """Owns the thread. Everything but `_run` and what it calls happens in the event loop.

    Args:
        load: called in the thread; returns the engine and the model's description. Calls its second argument now and
            then, which raises StartGivenUp once nobody wants the engine any more.
        step_limit_s: a step that takes longer counts as a failure.
        ranks: the other processes of a split model, which the worker ends; one that ends by itself is a failure.
    """

    def __init__(self, load: Load[Info], step_limit_s: float = STEP_LIMIT_S, ranks: Ranks | None = None) -> None:
        self.on_reports: Deliver = lambda _: None
        self._load = load
        self._step_limit_s = step_limit_s
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Info] = self._loop.create_future()
        self._ended: asyncio.Future[str] = self._loop.create_future()
        # A daemon: a forward that hangs beyond `stop` must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="verifier", daemon=True)
        self._inbox: Inbox | None = None
        self._watching: asyncio.Task[None] | None = None
        self._stopping = False
        self._ranks = ranks
        if ranks is not None:
            ranks.lost.add_done_callback(lambda lost: self._tell(self._lose, lost.result()))

    async def start(self) -> Info:
        """The model's description once it is loaded and measured.

        Cancelled, it returns when the thread has ended, or at a limit.

        Raises:
            Exception: whatever `load` raised.
        """
        self._thread.start()
        try:
            return await asyncio.shield(self._ready)
        except asyncio.CancelledError:
            self._ask_to_stop()
            await self._wait_for_the_end(GIVE_UP_LIMIT_S)
            await self._end_ranks()
            # Nobody else will ask for it.
            if not self._ready.cancel():
                self._ready.exception()
            raise
        except Exception:
            await self._end_ranks()
            raise

    def send(self, command: Command) -> None:
        """After `start`. Never blocks; wakes the engine at once."""
        if self._inbox is None:
            raise RuntimeError("a command before the engine was ready")
        self._inbox.put(command)

    @property
    def backlog(self) -> int:
        """Weight of the commands that wait."""
        return 0 if self._inbox is None else self._inbox.weight

    async def failed(self) -> str:
        """Return, with the reason, when the thread has ended without being asked to."""
        reason = await asyncio.shield(self._ended)
        if self._stopping:
            await asyncio.Event().wait()
        return reason

    async def stop(self) -> None:
        """End the thread after the step under way. Idempotent."""
        self._ask_to_stop()
        await self._wait_for_the_end(STOP_LIMIT_S)
        await self._end_ranks()
        if self._watching is not None:
            self._watching.cancel()

    async def _end_ranks(self) -> None:
        if self._ranks is not None:
            await asyncio.to_thread(self._ranks.close)

    async def _wait_for_the_end(self, limit_s: float) -> None:
        done, _ = await asyncio.wait({self._ended}, timeout=limit_s)
        if done:
            self._thread.join(JOIN_S)

    def _ask_to_stop(self) -> None:
        self._stopping = True
        if self._inbox is not None:
            self._inbox.put(Stop())

    # In the thread

    def _run(self) -> None:
        try:
            engine, info = self._load(self._deliver, self._go_on)
        except BaseException as error:
            self._tell(self._fail_start, error)
            return
        self._inbox = engine.inbox
        self._tell(self._start_watching, engine)
        self._tell(_settle, self._ready, info)
        reason = "the engine stopped"
        try:
            if not self._stopping:
                engine.run()
        except Exception as error:
            logger.exception("the engine failed")
            reason = f"the engine failed: {type(error).__name__}: {error}"
        self._tell(_settle, self._ended, reason)

    def _go_on(self) -> None:
        if self._stopping:
            raise StartGivenUp

    def _deliver(self, reports: Reports) -> None:
        self._tell(self._hand_over, reports)

    def _tell(self, report: Callable[..., object], *args: object) -> None:
        """Report to the event loop, unless it is gone."""
        try:
            self._loop.call_soon_threadsafe(report, *args)
        except RuntimeError:
            logger.debug("the event loop closed before the engine's thread ended")

    # In the event loop

    def _hand_over(self, reports: Reports) -> None:
        self.on_reports(reports)

    def _start_watching(self, engine: Runnable) -> None:
        self._watching = self._loop.create_task(self._watch(engine), name="watch the engine")

    async def _watch(self, engine: Runnable) -> None:
        """A step that does not end is a failure, although its thread says nothing."""
        while not self._ended.done():
            await asyncio.sleep(self._step_limit_s / 10)
            began_s = engine.step_began_s
            if began_s is not None and time.monotonic() - began_s > self._step_limit_s:
                _settle(self._ended, f"a step has been under way for more than {self._step_limit_s:g} s")

    def _lose(self, reason: str) -> None:
        """A rank is gone. What waits for it in the thread usually fails at once, and says more."""
        _settle(self._ended, reason)
        self._loop.call_later(GIVE_UP_LIMIT_S, self._fail_start, RuntimeError(reason))

    def _fail_start(self, error: BaseException) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
        _settle(self._ended, "the model was not loaded")


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)
