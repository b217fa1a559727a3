"""The other ranks of a split target: processes that this one starts, tells what to compute, and ends.

A rank reads orders from its stdin, and ends when that does, however this process ended. On its stdout it says that it
is ready, or why it cannot go on. Orders go through pipes, not by a collective: a rank may then wait for one as long as
nobody asks anything, while every collective has a deadline.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

MODULE = "verify_service.rank_process"
# Bytes of the number before each message: its length.
LENGTH_BYTES = 4
# Until a rank has imported what it needs; on a busy machine PyTorch and transformers take long.
THERE_LIMIT_S = 180.0
# Seconds from the end of a rank's stdout to its exit, and from the end of its stdin until it is killed.
END_LIMIT_S = 2.0
# Seconds until the reason of a broken forward is known here.
LOSS_LIMIT_S = 1.0


class Ranks:
    """The `RankGroup` as rank 0 sees it. `lost`: why it cannot go on, once one of the others has ended."""

    rank = 0

    def __init__(self, size: int, load: Mapping[str, object] | None = None) -> None:
        """load: the arguments of `load_model` that each of the others loads with, too."""
        self.size = size
        self.lost: Future[str] = Future()
        self._load = dict(load or {})
        self._others: list[RankHandle] = []
        self._at_end = ExitStack()
        self._lock = threading.Lock()
        self._closed = False

    def meet(self) -> str:
        """Start the others; see RankGroup. Once."""
        folder = self._at_end.enter_context(TemporaryDirectory(prefix="specwire-ranks-"))
        meeting = str(Path(folder) / Path(folder).name)  # vLLM names what ranks share by the file alone
        for rank in range(1, self.size):
            told = {"rank": rank, "size": self.size, "meeting": meeting, "load": self._load}
            self._start(f"rank {rank} of {self.size}", json.dumps(told).encode())
        deadline = time.monotonic() + THERE_LIMIT_S
        for other in self._others:
            other.await_there(deadline - time.monotonic())
        return meeting

    def tell(self, order: bytes) -> None:
        if self._closed:
            raise BrokenPipeError("the ranks were ended")
        for other in self._others:
            other.tell(order)

    def loss(self) -> str:
        with suppress(TimeoutError):
            return self.lost.result(LOSS_LIMIT_S if self._others else 0.0)
        return ""

    def close(self) -> None:
        """End the others. Idempotent; from any thread."""
        with self._lock:
            self._closed = True
            others, self._others = self._others, []
        for other in others:
            other.hang_up()
        for other in others:
            other.end()
        self._at_end.close()

    def _start(self, name: str, told: bytes) -> None:
        with self._lock:
            if self._closed:
                raise BrokenPipeError("the ranks were ended while they started")
            self._others.append(RankHandle(name, told, self._ended))

    def _ended(self, why: str) -> None:
        """Note that another rank has ended; called in that rank's own thread."""
        with self._lock:
            if not self._closed and not self.lost.done():
                self.lost.set_result(why)


class RankHandle:
    """One of the other ranks' processes. `ended` is told why when it has ended."""

    def __init__(self, name: str, told: bytes, ended: Callable[[str], None]) -> None:
        self._name = name
        self._tell_of_end = ended
        self._there = threading.Event()
        self._error = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
        )
        self._listening = threading.Thread(target=self._listen, name=name, daemon=True)
        self._listening.start()
        with suppress(OSError):  # it has ended already, which the thread finds
            self.tell(told)

    def await_there(self, limit_s: float) -> None:
        """Raises OSError if it ends first, or is not there in time."""
        if not self._there.wait(max(0.0, limit_s)):
            raise TimeoutError(f"{self._name} did not start within {THERE_LIMIT_S:g} s")
        if self._error:
            raise ConnectionError(self._error)

    def tell(self, message: bytes) -> None:
        pipe = self._process.stdin
        if pipe is None or pipe.closed:
            raise BrokenPipeError(f"{self._name} was told to end")
        rest = memoryview(len(message).to_bytes(LENGTH_BYTES) + message)
        while rest:
            rest = rest[pipe.write(rest) :]

    def hang_up(self) -> None:
        """Close its stdin, which ends it."""
        if self._process.stdin is not None:
            with suppress(OSError):  # there is nobody to read what was not sent yet
                self._process.stdin.close()

    def end(self) -> None:
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_LIMIT_S)
        self._listening.join(END_LIMIT_S)

    def _listen(self) -> None:
        said = ""
        if self._process.stdout is not None:
            with self._process.stdout as lines:
                for line in lines:
                    said = str(json.loads(line).get("error", ""))
                    if not said:
                        self._there.set()
        self._error = f"{self._name}: {said}" if said else f"{self._name} ended {self._way()}"
        self._there.set()
        self._tell_of_end(self._error)

    def _way(self) -> str:
        try:
            code = self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "what it had to say"
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def _environment() -> dict[str, str]:
    """Ours, with what is importable here."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
