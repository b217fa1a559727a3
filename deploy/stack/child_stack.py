"""A stack in a process of its own, for a program that waits for its user and not for events."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from deploy.settings import PREFIX
from deploy.stack import subreaper
from deploy.stack.options import StackError
from deploy.stack.processes import end_tree, environment
from specwire.rpc.server_options import ANY_PORT

STOP_GRACE = 10.0
KEPT_LINES = 20


@contextmanager
def own_stack(words: Sequence[str], report: Callable[[str], None]) -> Iterator[str]:
    """Its address. It runs while the context lasts, whatever signals the terminal sends to this process.

    `report` gets the lines that it says while it starts. Raises StackError.
    """
    ours = ["--json", "--listen", ANY_PORT, "--http", "none", "--unlisted"]
    command = [sys.executable, "-m", "deploy", "up", *words, *ours]
    process = subprocess.Popen(
        [sys.executable, "-I", subreaper.__file__, str(os.getpid()), str(int(signal.SIGTERM)), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env={name: value for name, value in environment().items() if not name.startswith(PREFIX)},
    )
    said = _Said(process, report)
    try:
        line = process.stdout.readline() if process.stdout is not None else ""
        if not line:
            process.wait(STOP_GRACE)
            raise StackError(said.last())
        said.quiet()
        yield str(json.loads(line)["address"])
    finally:
        _stop(process)
        said.join()


class _Said:
    """What a process says on stderr: reported until `quiet`, the last lines kept."""

    def __init__(self, process: subprocess.Popen[str], report: Callable[[str], None]) -> None:
        self._process = process
        self._report: Callable[[str], None] | None = report
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def quiet(self) -> None:
        self._report = None

    def last(self) -> str:
        self._thread.join(1.0)
        return self._lines[-1].rpartition("error: ")[2] if self._lines else "the stack ended without a word"

    def join(self) -> None:
        self._thread.join(1.0)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        for line in self._process.stderr or ():
            self._lines.append(line.rstrip())
            if (report := self._report) is not None:
                report(self._lines[-1])


def _stop(process: subprocess.Popen[str]) -> None:
    """Ask it to end, and see to it."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_GRACE)
    if process.poll() is None:
        end_tree(process.pid)
    process.wait(STOP_GRACE)
