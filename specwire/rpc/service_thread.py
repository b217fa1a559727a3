"""The thread that a service computes in: it loads the model, then runs what it has loaded until it is stopped.

The event loop puts commands into an inbox and gets reports; drafter and verifier use the same class. The model is
loaded in the thread that computes with it, because the number of CPU threads belongs to the thread that sets it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from specwire.rpc.process import uncollected

logger = logging.getLogger(__name__)

STOP_LIMIT_S = 10.0
# Seconds to wait for a cancelled start, whose load may be under way.
GIVE_UP_LIMIT_S = 3.0
# A step that takes longer than this hangs.
STEP_LIMIT_S = 60.0
# Seconds between the thread's last report and its end.
JOIN_S = 1.0
# A peer that sends faster than the thread takes in is not read any further; in weight of commands.
MOST_BACKLOG = 1 << 16
BACKLOG_PAUSE_S = 0.005


def monotonic_us() -> float:
    """The clock of a service: the machine's monotonic one, in microseconds, for event loop and thread alike."""
    return time.monotonic_ns() / 1000


@dataclass(frozen=True, slots=True)
class Stop:
    """The last command: end the thread."""


Command = TypeVar("Command")
Reports = TypeVar("Reports")
Info = TypeVar("Info")
T = TypeVar("T")


class Inbox(Generic[Command]):
    """A queue of commands for one reader. `weight`: of what waits.

    Args:
        weigh: gives a command's size, in tokens and parts.
    """

    def __init__(self, weigh: Callable[[Command], int]) -> None:
        self.weight = 0
        self._weigh = weigh
        self._queue: SimpleQueue[tuple[Command | Stop, int]] = SimpleQueue()
        self._lock = threading.Lock()

    def put(self, command: Command | Stop) -> None:
        """Add a command. May be called from any thread; never blocks."""
        weight = 1 if isinstance(command, Stop) else self._weigh(command)
        with self._lock:
            self.weight += weight
        self._queue.put((command, weight))

    def get(self, timeout: float | None = None) -> Command | Stop:
        """Raises `queue.Empty` after `timeout` seconds."""
        return self._next(timeout)[0]

    def waiting(self, most: int) -> Iterator[Command | Stop]:
        """Take what waits, until `most` in weight is taken or nothing is left."""
        while most > 0 and not self._queue.empty():
            command, weight = self._next(0.0)
            most -= weight
            yield command

    def _next(self, timeout: float | None) -> tuple[Command | Stop, int]:
        taken = self._queue.get(timeout=timeout)
        with self._lock:
            self.weight -= taken[1]
        return taken

    def empty(self) -> bool:
        return self._queue.empty()


class Runnable(Protocol[Command]):
    """What the thread runs: the verifier's engine, or the drafter's sessions."""

    @property
    def inbox(self) -> Inbox[Command]: ...

    @property
    def step_began_s(self) -> float | None:
        """When the step under way began, by `time.monotonic`; None between steps."""
        ...

    def run(self) -> None:
        """Run until a Stop arrives."""
        ...


class Helpers(Protocol):
    """Other processes that the model is split over. `lost`: why they cannot go on, once that is so."""

    @property
    def lost(self) -> Future[str]: ...

    def close(self) -> None:
        """End them; blocks for a moment."""
        ...


GoOn = Callable[[], None]
# Called in the thread; returns the worker, and the model's description. Its reports go to the first argument. It calls
# the second now and then, which raises StartGivenUp once the start is cancelled.
Load = Callable[[Callable[[Reports], None], GoOn], tuple[Runnable[Command], Info]]


class StartGivenUp(Exception):
    """The thread was asked to stop while it loaded."""


class ServiceThread(Generic[Command, Reports, Info]):
    """Owns the thread. Everything but `_run` and what it calls happens in the event loop.

    on_reports: is called with the thread's reports, in order.

    Args:
        name: of the service, for people.
        step_limit_s: a step that takes longer counts as a failure.
        helpers: ended with the thread; the end of one is a failure.
        cores: that the thread may use once its model is loaded; none for all that the process may.
    """

    def __init__(
        self,
        name: str,
        load: Load[Reports, Command, Info],
        step_limit_s: float = STEP_LIMIT_S,
        helpers: Helpers | None = None,
        cores: frozenset[int] = frozenset(),
    ) -> None:
        self.on_reports: Callable[[Reports], None] = lambda _: None
        self._name = name
        self._load = load
        self._step_limit_s = step_limit_s
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Info] = self._loop.create_future()
        self._ended: asyncio.Future[str] = self._loop.create_future()
        # A daemon, because a forward that hangs beyond `stop` must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._inbox: Inbox[Command] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._stopping = False
        self._helpers = helpers
        self._cores = cores
        if helpers is not None:
            helpers.lost.add_done_callback(lambda lost: self._tell(self._lose, lost.result()))

    async def start(self) -> Info:
        """The model's description once it is loaded.

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
            await self._end_helpers()
            # Nobody else will ask for it.
            if not self._ready.cancel():
                self._ready.exception()
            raise
        except Exception:
            await self._end_helpers()
            raise

    def send(self, command: Command) -> None:
        """Send a command, after `start`. Never blocks; wakes the thread at once."""
        if self._inbox is None:
            raise RuntimeError(f"a command before the {self._name} was ready")
        self._inbox.put(command)

    async def room(self) -> None:
        """Return once the thread has taken in enough of what it was sent."""
        while self._inbox is not None and self._inbox.weight > MOST_BACKLOG:  # noqa: ASYNC110 # a thread empties it
            await asyncio.sleep(BACKLOG_PAUSE_S)

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
        await self._end_helpers()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _end_helpers(self) -> None:
        if self._helpers is not None:
            await asyncio.to_thread(self._helpers.close)

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
            with uncollected():
                runnable, info = self._load(partial(self._tell, self._hand_over), self._go_on)
        except BaseException as error:
            self._tell(self._fail_start, error)
            return
        if self._cores:
            # Of this thread. Those that its model has started may use all cores that the process may: prompts are
            # computed by them, too.
            os.sched_setaffinity(0, self._cores)
        self._inbox = runnable.inbox
        self._tell(self._start_watching, runnable)
        self._tell(_settle, self._ready, info)
        reason = f"the {self._name} stopped"
        try:
            if not self._stopping:
                runnable.run()
        except Exception as error:
            logger.exception("the %s failed", self._name)
            reason = f"the {self._name} failed: {type(error).__name__}: {error}"
        self._tell(_settle, self._ended, reason)

    def _go_on(self) -> None:
        if self._stopping:
            raise StartGivenUp

    def _tell(self, report: Callable[..., object], *args: object) -> None:
        """Report to the event loop, unless it is gone."""
        try:
            self._loop.call_soon_threadsafe(report, *args)
        except RuntimeError:
            logger.debug("the event loop closed before the %s's thread ended", self._name)

    # In the event loop

    def _hand_over(self, reports: Reports) -> None:
        """What cannot be told is lost, and a text would wait for it for ever. So the service fails, and texts move."""
        try:
            self.on_reports(reports)
        except Exception as error:
            logger.exception("a report of the %s could not be told", self._name)
            _settle(self._ended, f"a report could not be told: {type(error).__name__}: {error}")

    def _start_watching(self, runnable: Runnable[Command]) -> None:
        self._watching = self._loop.create_task(self._watch(runnable), name=f"watch the {self._name}")

    async def _watch(self, runnable: Runnable[Command]) -> None:
        """A step that does not end is a failure, although its thread reports nothing."""
        while not self._ended.done():
            await asyncio.sleep(self._step_limit_s / 10)
            began_s = runnable.step_began_s
            if began_s is not None and time.monotonic() - began_s > self._step_limit_s:
                _settle(self._ended, f"a step has been under way for more than {self._step_limit_s:g} s")

    def _lose(self, reason: str) -> None:
        """A helper is gone. The thread usually fails at once when it waits for it, with a better message."""
        _settle(self._ended, reason)
        self._loop.call_later(GIVE_UP_LIMIT_S, self._fail_start, RuntimeError(reason))

    def _fail_start(self, error: BaseException) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
        _settle(self._ended, "the model was not loaded")


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)
