"""Processes that the stack owns, bound to this one: they end with it, and what they start ends with them.

What a service starts is in its group (killed with it), or reads from it until its end (`specwire.text.sandbox`,
`verify_service.ranks`), so that nothing outlives a service that is killed, whoever started that.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from deploy.stack import bound_process

REAP_LIMIT = 10.0
KEPT_LINES = 20
LINE_LIMIT = 1 << 20
# What it mostly means that a signal ended a process which computes a model.
_FOREIGN = "a library computed what this processor or this build of it cannot (llama.cpp: make setup-llamacpp again)"
MEANINGS = {
    signal.SIGKILL: "mostly for want of memory: give fewer slots, a shorter context, or a smaller model",
    signal.SIGILL: f"an instruction that the processor lacks: {_FOREIGN}",
    **dict.fromkeys((signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT), f"mostly {_FOREIGN}"),
}
# What else is to be removed, however this process ends but by SIGKILL; each may be called twice and never raises.
AT_END: list[Callable[[], None]] = []


class Child:
    """A process bound to this one, in a session of its own so that a terminal's Ctrl-C reaches only us.

    Lines on its stderr go to `report`; the last are kept.
    """

    def __init__(self, process: asyncio.subprocess.Process, report: Callable[[str], None] | None) -> None:
        self.process = process
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._report = report
        self._reading = asyncio.create_task(self._read_errors())
        AT_END.append(self.kill)

    @classmethod
    async def start(cls, command: Sequence[str], report: Callable[[str], None] | None = None) -> Child:
        """Start a process that is killed when this one ends."""
        process = await asyncio.create_subprocess_exec(
            *bound(command, signal.SIGKILL),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=environment(),
            limit=LINE_LIMIT,
        )
        return cls(process, report)

    async def line(self) -> str | None:
        """Return the next line of its stdout; None once that is closed."""
        pipe = self.process.stdout
        line = await pipe.readline() if pipe is not None else b""
        return line.decode(errors="replace").rstrip("\n") if line else None

    async def wait(self) -> int:
        """Return the exit code once it has ended and its last words are read."""
        code = await self.process.wait()
        self._ended()
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.shield(self._reading)
        return code

    async def stop(self, grace: float) -> None:
        """Ask it to end, and kill it and its group after `grace` seconds. Idempotent."""
        if self.process.returncode is None:
            self.process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self.process.wait()
        self.kill()
        async with asyncio.timeout(REAP_LIMIT):
            await self.process.wait()
        self._ended()
        self._reading.cancel()

    def _ended(self) -> None:
        with suppress(ValueError):
            AT_END.remove(self.kill)

    def kill(self) -> None:
        """On the spot, with its group. Idempotent."""
        if self.process.returncode is None:
            kill_group(self.process.pid)

    async def _read_errors(self) -> None:
        pipe = self.process.stderr
        while pipe is not None and (line := await pipe.readline()):
            text = line.decode(errors="replace").rstrip()
            self.last_lines.append(text)
            if self._report is not None:
                self._report(text)


def bound(command: Sequence[str], number: int) -> list[str]:
    """The command line of a process that gets this signal when ours ends."""
    return [sys.executable, "-I", bound_process.__file__, str(os.getpid()), str(int(number)), *command]


class BlockingChild:
    """The same for threads that wait: a process bound to the thread that starts it. Its stdin is empty."""

    def __init__(
        self, command: Sequence[str], bound_by: int, env: Mapping[str, str], report: Callable[[str], None]
    ) -> None:
        self.process = subprocess.Popen(
            bound(command, bound_by),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env=env,
        )
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.report = report
        self._reading = threading.Thread(target=self._read_errors, name="stderr", daemon=True)
        self._reading.start()

    def line(self) -> str:
        """Return the next line of its stdout; "" once that is closed."""
        return self.process.stdout.readline() if self.process.stdout is not None else ""

    def last_words(self) -> str:
        """Return what it said last; "" for nothing."""
        self._reading.join(1.0)
        return self.last_lines[-1] if self.last_lines else ""

    def stop(self, grace: float) -> None:
        """Ask it to end, and see to it."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(grace)
        if self.process.poll() is None:
            kill_group(self.process.pid)
        self.process.wait(grace)
        self._reading.join(1.0)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def _read_errors(self) -> None:
        for line in self.process.stderr or ():
            self.last_lines.append(line.rstrip())
            self.report(self.last_lines[-1])


def kill_group(pid: int) -> None:
    """Kill a process that leads its group, and who else is in that."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def signalled(number: int) -> str:
    """That a signal ended a process, for people."""
    try:
        known = signal.Signals(number)
    except ValueError:
        return f"ended by signal {number}"
    meaning = MEANINGS.get(known)
    return f"ended by {known.name}{f', {meaning}' if meaning else ''}"


def environment() -> dict[str, str]:
    """Return ours, with the packages of this checkout importable and no usage statistics."""
    root = str(Path(__file__).resolve().parent.parent.parent)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    ours = {"RAY_USAGE_STATS_ENABLED": "0", **os.environ}
    return {**ours, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1"}
