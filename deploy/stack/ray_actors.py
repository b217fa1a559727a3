"""Services in Ray actors: one each, in a thread with an event loop of its own.

Plain classes with plain methods: a coroutine method would make Ray run the actor on an event loop of its own. They are
two classes because the class's name is what Ray shows as the name of the process.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import draft_service.server
import verify_service.server
from specwire.files import write_text
from specwire.rpc.process import Running, keep_loaded, one_line
from specwire.rpc.server_options import ModelServiceOptions
from specwire.telemetry.options import inherited

# ----------------------------------------------------------------------------------------------------------------------
# A service in a thread with an event loop of its own, for a process whose main thread is another's (Ray's).

Start = Callable[[ModelServiceOptions], Awaitable[Running]]

START_ATTEMPTS = 10
ATTEMPT_PAUSE = 0.5
STOP_GRACE = 1.0


@dataclass(frozen=True, slots=True)
class ThreadOutcome:
    """How a start went: the address, or an error in one sentence."""

    address: str = ""
    error: str = ""


class ActorThread:
    """Runs a service, and keeps its address when another process takes over.

    The first start writes its address to `address_file`. A start that finds the file is a successor's: it listens
    there, so that the orchestrator finds the service again, and ends its process if it cannot, for the next successor.
    """

    def __init__(self, start: Start, options: ModelServiceOptions, address_file: Path) -> None:
        self._start = start
        self._options = options
        self._address_file = address_file
        self._outcome: Future[ThreadOutcome] = Future()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="service", daemon=True)
        self._thread.start()

    def outcome(self) -> ThreadOutcome:
        """Wait for the start."""
        return self._outcome.result()

    def stop(self) -> None:
        """Stop the service and wait for that."""
        self._stopping.set()
        self._thread.join()

    async def _serve(self) -> None:
        succeeds = self._address_file.exists()
        try:
            running = await (self._succeed() if succeeds else self._start(self._options))
        except Exception as error:  # reported as the outcome
            if succeeds:
                os._exit(1)
            self._outcome.set_result(ThreadOutcome(error=one_line(error)))
            return
        write_text(self._address_file, running.address)
        keep_loaded()
        self._outcome.set_result(ThreadOutcome(address=running.address))
        await self._run(running)

    async def _succeed(self) -> Running:
        """Start on the predecessor's address; it may be held a moment longer than the predecessor lived."""
        options = replace(self._options, listen=self._address_file.read_text())
        for _ in range(START_ATTEMPTS - 1):
            try:
                return await self._start(options)
            except Exception:  # the last attempt's error counts
                await asyncio.sleep(ATTEMPT_PAUSE)
        return await self._start(options)

    async def _run(self, running: Running) -> None:
        """Serve until a stop is asked for; a service that cannot go on ends its process, for a successor."""
        failure: asyncio.Future[object] = asyncio.ensure_future(running.failed())
        stopping: asyncio.Future[object] = asyncio.ensure_future(asyncio.to_thread(self._stopping.wait))
        await asyncio.wait({failure, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            os._exit(1)
        failure.cancel()
        await running.stop(STOP_GRACE)


class ServiceActor:
    """After its process died Ray runs __init__ again, with the same arguments, in another."""

    def __init__(self, start: Start, options: ModelServiceOptions, address_file: Path) -> None:
        inherited().start(type(self).__name__.lower())
        self._service = ActorThread(start, options, address_file)

    def outcome(self) -> ThreadOutcome:
        """Wait for the start."""
        return self._service.outcome()

    def stop(self) -> None:
        """Stop the service; the actor's process stays."""
        self._service.stop()


class Verifier(ServiceActor):
    """The target model's service."""

    def __init__(self, options: ModelServiceOptions, address_file: Path) -> None:
        super().__init__(verify_service.server.start, options, address_file)


class Drafter(ServiceActor):
    """A draft model's service."""

    def __init__(self, options: ModelServiceOptions, address_file: Path) -> None:
        super().__init__(draft_service.server.start, options, address_file)


ACTORS: dict[str, type[Verifier] | type[Drafter]] = {"verifier": Verifier, "drafter": Drafter}
