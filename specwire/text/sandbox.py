"""Processes for foreign code or patterns, each with kernel limits on its time and its memory.

What a caller sends as a constraint, or a model's maker as a chat template, may ask for hours of computing or for all
memory. So each runs in a process of its own. It is forked from one that has loaded the libraries, which takes
milliseconds. `python -m MODULE CONTROL DATA WORDS...` runs that one: CONTROL and DATA are descriptors, of a socket that
brings one for each process to fork, and of a file. All end when the owner's ends of their sockets close.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

END_S = 5.0
# A forked process's first message: if it ends after that, its own work ended it.
BEGUN = b"\0"
# Where there are threads, a fork is not safe.
ALONE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}


class Busy(Exception):
    """Too much waits already, or it takes too long, or no process can be had: the caller may try again."""


class ForkServer:
    """The owner's side. The process that the others are forked from begins with the first connection.

    module: what it runs, with a `main` that ends in `serve`. words: its arguments. data: what its file holds.
    """

    def __init__(self, module: str, words: Sequence[str] = (), data: bytes = b"") -> None:
        self._command = module, tuple(words)
        self._data = data
        self.process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def begun(self) -> socket.socket:
        """The connection to a new process that has begun, non-blocking. Raises Busy, also where none was forked."""
        ours = self.connect()
        ours.setblocking(False)
        try:
            if await asyncio.get_running_loop().sock_recv(ours, len(BEGUN)):
                return ours
        except OSError:
            pass
        except BaseException:
            ours.close()
            raise
        ours.close()
        raise Busy("the process that others are forked from ended before it had forked one")

    def connect(self) -> socket.socket:
        """To a process to be. Raises Busy: where to fork it from ends at once, however often it starts."""
        control = self._control
        if control is None or self.process is None or self.process.poll() is not None:
            control = self._restart()
        try:
            return _forked(control)
        except OSError:  # it ended just now
            control = self._restart()
        try:
            return _forked(control)
        except OSError as error:
            raise Busy(f"the process that others are forked from is gone: {error.strerror}") from None

    def _restart(self) -> socket.socket:
        self.stop()
        self._control = self._start()
        return self._control

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        module, words = self._command
        with theirs, tempfile.TemporaryFile() as file:
            file.write(self._data)
            file.flush()
            file.seek(0)
            fds = theirs.fileno(), file.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, fds), *words],
                pass_fds=fds,
                env={**os.environ, **ALONE},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return ours

    def stop(self) -> None:
        """End the process that others are forked from, and those. Idempotent."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self.process is not None:
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None


def _forked(control: socket.socket) -> socket.socket:
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            socket.send_fds(control, [b"\0"], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
    return ours


def serve(control: socket.socket, session: Callable[[int], None], most_memory: int) -> None:
    """For ever, fork a process for each descriptor that comes, which runs `session` on it in at most so many bytes."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not fds:  # the owner has ended: so do all that were forked
            os.killpg(0, signal.SIGKILL)
        if os.fork() == 0:
            control.close()
            resource.setrlimit(resource.RLIMIT_AS, (most_memory, most_memory))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            try:
                os.write(fds[0], BEGUN)
                session(fds[0])
            except Lost:
                pass
            finally:
                os._exit(0)
        os.close(fds[0])


def limit(seconds: float) -> None:
    """The kernel ends this process when it has computed for so long; 0: no more."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


# ----------------------------------------------------------------------------------------------------------------------
# Messages between a service and such a process: a length, then so many bytes.

LENGTHS = struct.Struct("<II")
HEAD = LENGTHS.size
ENDED = "took more time or memory than it may"


class Lost(Exception):
    """The other end is gone, or does not answer in time."""


class Closed(Lost):
    """The other end closed the connection: its limits ended it, or it is done."""


def packed(said: dict[str, Any], data: bytes = b"") -> bytes:
    """An object, and bytes behind it."""
    head = json.dumps(said).encode()
    return LENGTHS.pack(len(head), len(data)) + head + data


def lengths_of(head: bytes) -> tuple[int, int]:
    """Bytes of the object and of the data behind it, as the first HEAD bytes say."""
    object_size, data_size = LENGTHS.unpack(head)
    return object_size, data_size


def send(fd: int, said: dict[str, Any], data: bytes = b"") -> None:
    """Raises Lost."""
    left = memoryview(packed(said, data))
    try:
        while left:
            left = left[os.write(fd, left) :]
    except OSError as error:
        raise Lost(f"the process that holds it is gone: {error.strerror}") from None


def receive(fd: int) -> tuple[dict[str, Any], bytes]:
    """Receive what was sent. Raises Lost."""
    head, data = lengths_of(_read(fd, HEAD))
    return json.loads(_read(fd, head)), _read(fd, data)


def _read(fd: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = os.read(fd, size - len(parts))
        except OSError as error:
            raise Lost(f"the process that holds it is gone: {error.strerror}") from None
        if not part:
            raise Closed(ENDED)
        parts += part
    return bytes(parts)


async def ask(process: socket.socket, said: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """What it answers, by a connection that does not block. Raises OSError; Closed."""
    loop, told = asyncio.get_running_loop(), bytearray()
    await loop.sock_sendall(process, packed(said))
    head, size = 0, HEAD
    while len(told) < size:
        part = await loop.sock_recv(process, size - len(told))
        if not part:
            raise Closed(ENDED)
        told += part
        if len(told) == HEAD:
            head, data = lengths_of(bytes(told))
            size += head + data
    return json.loads(told[HEAD : HEAD + head]), bytes(told[HEAD + head :])


def readable(fd: int, limit_s: float) -> bool:
    """Whether something can be read, or will never be, within so many seconds."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(limit_s * 1000))
