"""Compiles constraints in threads of its own, because it may take a second, and what a caller sends may ask for more.

Neither the event loop nor the thread that computes waits for it: whoever asked is told when it is done.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Hashable, Sequence

from specwire.core.constraint import Constraint, Matcher
from specwire.core.invalid import InvalidParameter

try:
    from specwire.text.constrained import Grammars

    INSTALLED = True
except ModuleNotFoundError:  # the extra is not
    INSTALLED = False

logger = logging.getLogger(__name__)

THREADS = 2
# Seconds for one constraint, its wait for a thread included.
LIMIT_S = 10.0
# What waits for a thread; more is refused.
MOST_WAITING = 256
# Seconds for which a thread waits for more before it ends.
IDLE_S = 0.5


class NotInstalled(Exception):
    """The library is not there."""


class Busy(Exception):
    """Too much waits already, or it takes too long."""


Found = Matcher | InvalidParameter | NotInstalled | Busy


class Job:
    """One constraint to begin; `done` gets the outcome, in the event loop."""

    def __init__(
        self, constraint: Constraint, output: Sequence[int], done: asyncio.Future[Matcher | InvalidParameter]
    ) -> None:
        self._constraint = constraint
        self._output = output
        self._done = done
        self._loop = asyncio.get_running_loop()

    def run(self, begin: Callable[[Constraint], Matcher]) -> None:
        """In a thread."""
        if self._done.cancelled():  # nobody waits any more
            return
        found = self._begun(begin)
        try:
            self._loop.call_soon_threadsafe(self._settle, found)
        except RuntimeError:  # the loop has closed: nobody is left to hear it
            return

    def _begun(self, begin: Callable[[Constraint], Matcher]) -> Matcher | InvalidParameter:
        try:
            matcher = begin(self._constraint)
            taken = matcher.take(self._output)
        except InvalidParameter as error:
            return error
        except BaseException:  # also a panic in the library, which is no Exception: the thread goes on
            logger.exception("a constraint could not be compiled")
            return self._constraint.invalid("could not be compiled; the service's log says why")
        if taken < len(self._output):
            return self._constraint.invalid(f"does not allow the output as it is, at its token {taken}")
        return matcher

    def _settle(self, found: Matcher | InvalidParameter) -> None:
        if not self._done.done():
            self._done.set_result(found)


class Compiler:
    """For one model's tokenizer. Its threads begin with a constraint, and end when there is none to compile.

    Args: see `specwire.text.constrained.Grammars`.
    """

    def __init__(self, tokenizer_json: bytes, vocabulary: int, eos_ids: Sequence[int]) -> None:
        self._grammars = Grammars(tokenizer_json, vocabulary, eos_ids) if INSTALLED else None
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running = 0

    async def begin(self, constraint: Constraint, output: Sequence[int], limit_s: float = LIMIT_S) -> Matcher:
        """The constraint behind what there is of the output.

        Raises:
            InvalidParameter: it is none, asks for too much, or does not allow the output.
            NotInstalled: this service lacks the library.
            Busy: too much waits, or it was not done within `limit_s` seconds.
        """
        if self._grammars is None:
            raise NotInstalled(f"{constraint.kind}: needs llguidance here (pip install 'specwire[constrained]')")
        if self._jobs.qsize() >= MOST_WAITING:
            raise Busy(f"{constraint.kind}: {MOST_WAITING} constraints wait to be compiled")
        done: asyncio.Future[Matcher | InvalidParameter] = asyncio.get_running_loop().create_future()
        self._hand_over(Job(constraint, output, done), self._grammars.begin)
        try:
            async with asyncio.timeout(limit_s):
                found = await done
        except TimeoutError:
            raise Busy(f"{constraint.kind}: was not compiled within {limit_s:g} s") from None
        if isinstance(found, InvalidParameter):
            raise found
        return found

    def _hand_over(self, job: Job, begin: Callable[[Constraint], Matcher]) -> None:
        with self._lock:
            self._jobs.put(job)
            if self._running < THREADS:
                self._running += 1
                # A daemon: one that the library keeps must not keep the process alive.
                threading.Thread(target=self._run, args=(begin,), name="constraints", daemon=True).start()

    def _run(self, begin: Callable[[Constraint], Matcher]) -> None:
        while True:
            try:
                self._jobs.get(timeout=IDLE_S).run(begin)
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._running -= 1
                        return


class Beginnings:
    """Owns a task for each constraint that is being compiled for a link's session."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._tasks: dict[asyncio.Task[None], Hashable] = {}

    def begin(
        self, link: Hashable, constraint: Constraint, output: Sequence[int], tell: Callable[[Found], object]
    ) -> None:
        """`tell` is called with what became of it, unless the link is lost first."""
        task = asyncio.ensure_future(self._begin(constraint, output, tell))
        self._tasks[task] = link
        task.add_done_callback(self._tasks.pop)

    def lost(self, link: Hashable) -> None:
        """Whoever takes its sessions over opens them anew."""
        for task in [task for task, theirs in self._tasks.items() if theirs == link]:
            task.cancel()

    async def _begin(self, constraint: Constraint, output: Sequence[int], tell: Callable[[Found], object]) -> None:
        found: Found
        try:
            found = await self._compiler.begin(constraint, output)
        except (InvalidParameter, NotInstalled, Busy) as error:
            found = error
        tell(found)
