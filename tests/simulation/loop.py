"""An asyncio event loop without clock, threads or I/O: virtual time, and a seeded choice of who runs next.

Callbacks belong to strands: one for each thread of a simulated process, found by a context variable that tasks and
callbacks inherit. Within a strand the order is asyncio's own (first in, first out), which code may rely on; between
strands nothing is promised, so the seed decides. Time stands still while something can run.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from bisect import bisect_left, insort
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from operator import itemgetter
from random import Random
from typing import Any, Generic, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

WORLD = "world"
# Tasks among which those are looked for that have ended.
LEAST_TASKS = 1024
# Unix time at the loop's 0, in seconds.
EPOCH = 1000.0
STRAND: ContextVar[str] = ContextVar("strand", default=WORLD)


class Stuck(AssertionError):
    """Nothing can run any more, or too much has run, before what was waited for."""


class SimTask(asyncio.Task[T]):
    """Hashes by its number: sets of tasks have the same order in every run."""

    def __init__(self, coro: Coroutine[Any, Any, T], loop: SimLoop, strand: str, **options: Any) -> None:
        self.number = next(loop.numbers)
        self.strand = strand
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self.number


def _failed_unheard(task: SimTask[Any]) -> bool:
    return task.done() and not task.cancelled() and task._log_traceback


class SimFuture(asyncio.Future[T]):
    def __init__(self, loop: SimLoop) -> None:
        self.number = next(loop.numbers)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class AllOf(Generic[T]):
    """Whether something has come true of all, and stays so: of which it has is not asked again."""

    def __init__(self, those: Iterable[T], holds: Callable[[T], bool]) -> None:
        self._left = list(those)
        self._holds = holds

    def __call__(self) -> bool:
        while self._left and self._holds(self._left[-1]):
            self._left.pop()
        return not self._left


@dataclass(slots=True)
class Strand:
    """number: in the order in which they came. paused: as by SIGSTOP, or for good: what would run waits for `bury`.

    cost: seconds that each callback takes; the next one runs at `free_at` or later. listed: the loop has it among those
    with something ready, or is about to: the garbage collector may have a generator closed at any moment.
    """

    name: str
    number: int
    ready: deque[asyncio.Handle] = field(default_factory=deque)
    paused: bool = False
    listed: bool = False
    cost: float = 0.0
    free_at: float = 0.0


class SimLoop(asyncio.AbstractEventLoop):
    """`after_step` is called after every callback; `errors` holds what callbacks and tasks let go unhandled."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.numbers = itertools.count()
        self.steps = 0
        self.running = WORLD
        self.errors: list[str] = []
        # All that have not ended, and what has failed unheard.
        self.tasks: list[SimTask[Any]] = []
        self._most_tasks = LEAST_TASKS
        self.after_step: Callable[[], None] = lambda: None
        self._now = 0.0
        self._strands: dict[str, Strand] = {}
        # Those that have something ready and are not held, by number and in its order: a storm has thousands of others.
        self._ready: list[tuple[int, Strand]] = []
        self._timers: list[tuple[float, float, int, asyncio.TimerHandle, Strand]] = []

    # Strands

    def strand(self, name: str) -> Strand:
        found = self._strands.get(name)
        if found is None:
            found = self._strands[name] = Strand(name, len(self._strands))
        return found

    def strands_of(self, process: str) -> list[Strand]:
        """A process is its main strand and those named PROCESS/..."""
        return [s for name, s in self._strands.items() if name == process or name.startswith(f"{process}/")]

    def context_of(self, name: str) -> Context:
        """A context whose callbacks and tasks belong to the strand `name`."""
        context = copy_context()
        context.run(STRAND.set, name)
        self.strand(name)
        return context

    def hold(self, process: str) -> None:
        """Nothing of it runs any more before `let_go` or `bury`."""
        for strand in self.strands_of(process):
            strand.paused = True
            self._unlist(strand)

    def let_go(self, process: str) -> None:
        for strand in self.strands_of(process):
            strand.paused = False
            self._list(strand)

    def _list(self, strand: Strand) -> None:
        if strand.ready and not (strand.paused or strand.listed):
            strand.listed = True
            insort(self._ready, (strand.number, strand), key=itemgetter(0))

    def _unlist(self, strand: Strand) -> None:
        if strand.listed:
            strand.listed = False
            del self._ready[bisect_left(self._ready, strand.number, key=itemgetter(0))]

    def left_of(self, process: str) -> list[str]:
        """Tasks of the process that have not ended."""
        return [repr(task.get_coro()) for task in self.tasks if not task.done() and process_of(task.strand) == process]

    # Running

    def run_until(self, done: Callable[[], bool], seconds: float, most_steps: int = 1_000_000) -> None:
        """Raises Stuck where `done` does not come true within the time, or nothing is left to run."""
        deadline, last = self._now + seconds, self.steps + most_steps
        asyncio.events._set_running_loop(self)
        try:
            while not done():
                if not self._step(deadline):
                    raise Stuck(f"nothing more has happened by {self._now:.3f} s")
                if self.steps > last:
                    raise Stuck(f"more than {most_steps} callbacks")
        finally:
            asyncio.events._set_running_loop(None)

    def _step(self, deadline: float) -> bool:
        self._fire()
        runnable = [s for _, s in self._ready if s.free_at <= self._now]
        if not runnable:
            return self._advance(deadline)
        strand = runnable[0] if len(runnable) == 1 else runnable[int(self.random.random() * len(runnable))]
        handle = strand.ready.popleft()
        if not strand.ready:
            self._unlist(strand)
            self._list(strand)
        if not handle.cancelled():
            self.steps += 1
            self.running = strand.name
            handle._run()
            strand.free_at = self._now + strand.cost
            self.after_step()
        return True

    def _fire(self) -> None:
        """What is due becomes ready; of timers that are due together the seed decides the order."""
        while self._timers and self._timers[0][0] <= self._now:
            _, _, _, timer, strand = heapq.heappop(self._timers)
            if not timer.cancelled():
                self._add(strand, timer)

    def _add(self, strand: Strand, handle: asyncio.Handle) -> None:
        strand.ready.append(handle)
        self._list(strand)

    def _advance(self, deadline: float) -> bool:
        busy = [s.free_at for _, s in self._ready]
        while self._timers and self._timers[0][3].cancelled():
            heapq.heappop(self._timers)
        upcoming = [self._timers[0][0]] if self._timers else []
        if not (busy or upcoming):
            return False
        self._now = min(busy + upcoming)
        return self._now <= deadline

    def unheard(self) -> list[str]:
        """Exceptions of tasks that nobody has asked for."""
        failed = filter(_failed_unheard, self.tasks)
        return [f"{task.get_coro()!r} in {task.strand}: {task.exception()!r}" for task in failed]

    def bury(self, seconds: float) -> list[str]:
        """End what still runs in strands that are alive or dead; returns what was left, by name."""
        for strand in list(self._strands.values()):
            strand.paused = False
            self._list(strand)
        left = [task for task in self.tasks if not task.done()]
        for _ in range(20):
            pending = [task for task in self.tasks if not task.done()]
            if not pending:
                break
            for task in pending:
                task.cancel()
            self.run_until(AllOf(pending, SimTask.done), seconds)
        return [repr(task) for task in left]

    # What asyncio calls

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        context = context or copy_context()
        handle = asyncio.Handle(callback, args, self, context)
        self._add(self._strand_in(context), handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        context = context or copy_context()
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        entry = (when, self.random.random(), next(self.numbers), timer, self._strand_in(context))
        heapq.heappush(self._timers, entry)
        return timer

    def _strand_in(self, context: Context) -> Strand:
        return self.strand(context.get(STRAND, WORLD))

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is dropped when its time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return SimFuture(self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None, **_: Any
    ) -> asyncio.Task[Any]:
        strand = STRAND.get() if context is None else context.get(STRAND, WORLD)
        task = SimTask(coro, self, strand, name=name, context=context)
        self.tasks.append(task)
        known = len(self.tasks)
        if known > self._most_tasks:
            self._most_tasks = 2 * known
            self.tasks[:known] = [each for each in self.tasks[:known] if not each.done() or _failed_unheard(each)]
            self._most_tasks = max(LEAST_TASKS, 2 * len(self.tasks))
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.errors.append(f"{context.get('message')}: {error!r}")

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        """For sys.set_asyncgen_hooks, as asyncio's own loop does it."""
        self.create_task(generator.aclose())


def in_strand(loop: SimLoop, name: str, coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Run a coroutine as a task of that strand."""
    return loop.create_task(coro, context=loop.context_of(name))


def process_of(strand: str) -> str:
    return strand.partition("/")[0]


def current_process() -> str:
    return process_of(STRAND.get())
