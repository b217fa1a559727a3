"""A child process that speaks in lines of JSON: requests have a deadline, and it ends with this process."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from bench.harness import ROOT
from bench.harness.runs import BenchError
from deploy.stack.processes import bound, environment

Message = dict[str, Any]  # as JSON has it

READ_SIZE = 1 << 16
STOP_GRACE = 30.0
END_LIMIT = 5.0


class BenchChild:
    """Runs a command in a session of its own, so that Ctrl-C reaches only us and we end it in order.

    Its errors go to our stderr, or into the file `errors`. It has no OMP_NUM_THREADS from us: both sides set their
    threads themselves. cores: which it may use; none for all that we may.
    """

    def __init__(
        self, name: str, command: Sequence[str], errors: IO[bytes] | None = None, cores: frozenset[int] = frozenset()
    ) -> None:
        self.name = name
        settings = environment()
        settings.pop("OMP_NUM_THREADS", None)
        self._process = subprocess.Popen(
            bound(command, signal.SIGTERM),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            env=settings,
            cwd=ROOT,
        )
        if cores:
            os.sched_setaffinity(self._process.pid, cores)  # before it has threads, which inherit this
        self._pending = b""

    def ask(self, request: Mapping[str, object], limit: float) -> Message:
        """Send a request; the answer, within `limit` seconds. BenchError if it fails, ends, or says "error"."""
        if self._process.stdin is None or self._process.stdin.closed:
            raise BenchError(f"{self.name}: takes no requests any more")
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise BenchError(f"{self.name}: has ended") from None
        return self.answer(limit)

    def answer(self, limit: float) -> Message:
        """The next line that it prints."""
        answer: Message = json.loads(self._line(time.monotonic() + limit))
        if "error" in answer:
            raise BenchError(f"{self.name}: {answer['error']}")
        return answer

    @property
    def pid(self) -> int:
        """Its number, which is its group's."""
        return self._process.pid

    def cpu_seconds(self) -> float:
        """Processor time of it and of all below it so far."""
        pid = self._process.pid
        return sum(cpu_seconds(one) for one in (pid, *descendants(pid)))

    def stop(self) -> None:
        """Ask it to end (a signal, the end of its input), then make it. Idempotent."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_GRACE)
            except subprocess.TimeoutExpired:
                end_tree(self._process.pid)
                self._process.wait(STOP_GRACE)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _line(self, deadline: float) -> bytes:
        pipe = self._process.stdout
        while pipe is not None and b"\n" not in self._pending:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise BenchError(f"{self.name}: no answer in time")
            piece = os.read(pipe.fileno(), READ_SIZE)
            if not piece:
                raise BenchError(f"{self.name}: ended without an answer; its last words are above")
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        return line


def cpu_seconds(pid: int, thread: int = 0) -> float:
    """User and system time of a process of Linux, or of one of its threads; 0 if it is gone."""
    stat = Path(f"/proc/{pid}/task/{thread}/stat" if thread else f"/proc/{pid}/stat")
    try:
        fields = stat.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def end_tree(pid: int) -> None:
    """Kill a process and everything below it. It is stopped first, so that it starts nothing in answer."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        end_descendants(pid)
        os.kill(pid, signal.SIGKILL)


def end_descendants(pid: int) -> None:
    """Kill everything below a process, again and again until nothing lives there (a dying tree may still fork)."""
    deadline = time.monotonic() + END_LIMIT
    while (living := descendants(pid)) and time.monotonic() < deadline:
        for one in living:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        time.sleep(0.01)


def descendants(pid: int) -> list[int]:
    """Return the living processes below `pid`, zombies left out, parents first."""
    children: dict[int, list[int]] = {}
    for one, parent in _living():
        children.setdefault(parent, []).append(one)
    found: list[int] = []
    frontier = [pid]
    while frontier:
        frontier = [child for parent in frontier for child in children.get(parent, ())]
        found += frontier
    return found


def _living() -> Iterator[tuple[int, int]]:
    """Yield (pid, parent's pid). A zombie's children have a new parent already, so leaving it out loses none."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                # The name in parentheses may hold anything; the state and the parent follow its last parenthesis.
                state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    yield int(entry.name), int(parent)
