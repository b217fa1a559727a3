"""The engine's thread: loads the model, measures it, then runs the engine until it is stopped.

The model is loaded in the thread that computes with it, because the number of CPU threads belongs to the thread that
sets it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from verify_service.commands import Command, Reports, Stop
from verify_service.inbox import Inbox

logger = logging.getLogger(__name__)

STOP_LIMIT_S = 10.0
# Between the thread's last words and its end.
JOIN_S = 1.0

Info = TypeVar("Info")
T = TypeVar("T")


class Runnable(Protocol):
    """What the thread drives: `verify_service.engine.Engine`, which needs torch where this module does not."""

    @property
    def inbox(self) -> Inbox: ...

    def run(self) -> None: ...


Deliver = Callable[[Reports], None]
Load = Callable[[Deliver], tuple[Runnable, Info]]


class Worker(Generic[Info]):
    """Owns the thread. Everything but `_run` and what it calls happens in the event loop.

    Args:
        load: called in the thread; returns the engine and the model's description.
    """

    def __init__(self, load: Load[Info]) -> None:
        self.on_reports: Deliver = lambda _: None
        self._load = load
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Info] = self._loop.create_future()
        self._ended: asyncio.Future[str] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="verifier")
        self._inbox: Inbox | None = None
        self._stopping = False

    async def start(self) -> Info:
        """The model's description once it is loaded and measured. Cancelled, it returns when the thread has ended.

        Raises:
            Exception: whatever `load` raised.
        """
        self._thread.start()
        try:
            return await asyncio.shield(self._ready)
        except asyncio.CancelledError:
            self._ask_to_stop()
            await asyncio.wait({self._ended})
            self._thread.join(JOIN_S)
            if self._ready.done():
                self._ready.exception()  # nobody else will ask for it
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
        done, _ = await asyncio.wait({self._ended}, timeout=STOP_LIMIT_S)
        if done:
            self._thread.join(JOIN_S)

    def _ask_to_stop(self) -> None:
        self._stopping = True
        if self._inbox is not None:
            self._inbox.put(Stop())

    # In the thread

    def _run(self) -> None:
        try:
            engine, info = self._load(self._deliver)
        except BaseException as error:
            self._tell(self._fail_start, error)
            return
        self._inbox = engine.inbox
        self._tell(_settle, self._ready, info)
        reason = "the engine stopped"
        try:
            if not self._stopping:
                engine.run()
        except Exception as error:
            logger.exception("the engine failed")
            reason = f"the engine failed: {type(error).__name__}: {error}"
        self._tell(_settle, self._ended, reason)

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

    def _fail_start(self, error: BaseException) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
        _settle(self._ended, "the model was not loaded")


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)
