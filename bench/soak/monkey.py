"""The monkey: kills, stops and restarts processes, cuts and stalls lines, by a seed.

It breaks within what docs/RELIABILITY.md promises to survive: one of two that do the same at a time, the log for
seconds. Which faults come, and in what order, is a function of the seed; what they meet is not.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from bench.harness.runs import BenchError
from bench.harness.services import Process
from bench.soak.rig import LINE, Rig, ready

EVERY_S = 3.0
AT_ONCE = 3
# Seconds for which a role is left alone after a fault, so that what was lost can be found again.
RESPITE_S = 2.0
# How often a process is started before it counts as broken, and what one says that may start again.
STARTS, NO_LOG = 20, "redis-url: cannot use"


class FaultKind(StrEnum):
    KILL = "killed"
    STOP = "stopped"
    LEAVE = "restarted"
    CUT = "cut"
    STALL = "stalled"


PROCESS_KINDS, LINE_KINDS = (FaultKind.KILL, FaultKind.STOP, FaultKind.LEAVE), (FaultKind.CUT, FaultKind.STALL)
MOST_S = {FaultKind.KILL: 2.0, FaultKind.STOP: 8.0, FaultKind.LEAVE: 1.0, FaultKind.CUT: 3.0, FaultKind.STALL: 8.0}


@dataclass(frozen=True, slots=True)
class Fault:
    """`seconds` until it is mended."""

    kind: FaultKind
    target: str
    seconds: float

    @property
    def role(self) -> str:
        """What is not to be hurt twice at a time."""
        return self.target if self.kind in LINE_KINDS else self.target.split()[0]

    @property
    def name(self) -> str:
        """For counting: lines by the service that they lead to."""
        what = f"{LINE} to {self.target.rpartition(' to ')[2].split()[0]}" if self.kind in LINE_KINDS else self.role
        return f"{what} {self.kind}"


class Monkey:
    """`faults` counts what it has done, `wrong` holds what a process should not have answered with."""

    def __init__(self, rig: Rig, seed: int, say: Callable[[str], None], every: float = EVERY_S) -> None:
        self.faults: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._rig = rig
        self._random = Random(seed)
        self._say = say
        self._every = every
        self._busy: set[str] = set()

    @property
    def names(self) -> set[str]:
        """Of all faults that it may think of."""
        on_lines = {Fault(kind, line, 0.0).name for kind in LINE_KINDS for line in self._rig.lines}
        return on_lines | {Fault(kind, part, 0.0).name for kind in PROCESS_KINDS for part in self._rig.parts}

    async def run(self, until: asyncio.Event) -> None:
        """Until told to end; then every fault that is under way is mended first."""
        async with asyncio.TaskGroup() as tasks:
            while not until.is_set():
                fault = self._draw()
                if fault.role not in self._busy and len(self._busy) < AT_ONCE:
                    self._busy.add(fault.role)
                    tasks.create_task(self._inflict(fault))
                await within(until, self._random.uniform(0.2, 2 * self._every))

    def _draw(self) -> Fault:
        on_a_line = self._random.random() < 0.4
        kind = self._random.choice(LINE_KINDS if on_a_line else PROCESS_KINDS)
        target = self._random.choice(sorted(self._rig.lines if on_a_line else self._rig.parts))
        return Fault(kind, target, self._random.uniform(0.0, MOST_S[kind]))

    async def _inflict(self, fault: Fault) -> None:
        self._say(f"{fault.target}: {fault.kind} ({fault.seconds:.1f} s)")
        self.faults[fault.name] += 1
        try:
            await self._deed(fault)
            await asyncio.sleep(RESPITE_S)
        finally:
            self._busy.discard(fault.role)

    def _deed(self, fault: Fault) -> Awaitable[None]:
        match fault.kind:
            case FaultKind.CUT:
                return asyncio.to_thread(self._rig.lines[fault.target].cut, fault.seconds)
            case FaultKind.STALL:
                return asyncio.to_thread(self._rig.lines[fault.target].stall, fault.seconds)
            case FaultKind.STOP:
                return self._stop(self._rig.parts[fault.target], fault.seconds)
            case FaultKind.KILL:
                return self._kill(self._rig.parts[fault.target], fault.seconds)
            case FaultKind.LEAVE:
                return self._leave(self._rig.parts[fault.target], fault)

    async def _stop(self, part: Process, seconds: float) -> None:
        part.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            part.send(signal.SIGCONT)

    async def _kill(self, part: Process, seconds: float) -> None:
        await asyncio.to_thread(part.kill)
        await asyncio.sleep(seconds)
        await self._again(part)

    async def _leave(self, part: Process, fault: Fault) -> None:
        said = await asyncio.to_thread(part.end)
        if said:
            self.wrong.append(f"{fault.target}: {said}")
        await asyncio.sleep(fault.seconds)
        await self._again(part)

    async def _again(self, part: Process) -> None:
        """As its supervisor would: an orchestrator that finds no log says so and ends, and is started again."""
        for attempt in range(STARTS):
            part.restart()  # by this thread: a process is bound to the one that started it
            try:
                await asyncio.to_thread(ready, part)
            except BenchError as error:
                if NO_LOG not in str(error) or attempt == STARTS - 1:
                    self.wrong.append(str(error))
                    return
                await asyncio.sleep(RESPITE_S)
            else:
                return


async def within(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event came within so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
