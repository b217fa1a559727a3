"""How much memory a service holds, told by itself: python -m bench.soak.weighing SOCKET MODULE [ARGUMENT ...].

Runs MODULE as `python -m` does; who connects to SOCKET meanwhile is told the bytes that are allocated and not freed,
once what can be collected is collected. Resident memory says something else: what the allocator has not given back
goes up and down in waves of tens of MiB, and what waits to be collected is no leak.

All of the process is counted, whoever allocated: the C library's allocator has Python's objects too where the process
was started with `ENVIRONMENT`.
"""

from __future__ import annotations

import ctypes
import gc
import runpy
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

# Python's own allocator takes arenas of 1 MiB past malloc, and does not tell how many bytes of them are in use.
ENVIRONMENT = {"PYTHONMALLOC": "malloc"}
LIMIT_S = 30.0
MOST_BYTES = 32
FIELDS = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)


class Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc: uordblks is in use in all arenas, hblkhd mapped block by block."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in FIELDS)
    uordblks: int
    hblkhd: int


def supported() -> bool:
    """Whether this C library tells what is allocated: glibc from 2.33 on."""
    return hasattr(ctypes.CDLL(None), "mallinfo2")


def held_bytes() -> int:
    """Of this process: allocated, not freed, and not to be collected."""
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo
    info: Mallinfo = mallinfo2()
    return info.uordblks + info.hblkhd


def weigh(path: Path) -> int:
    """Bytes that the process behind the socket holds. OSError if it does not answer."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(LIMIT_S)
        line.connect(str(path))
        with line.makefile("rb") as stream:
            answer = stream.read(MOST_BYTES)
    if not answer:
        raise ConnectionError(f"{path}: the process ended before it answered")
    return int(answer)


def words(path: Path, module: str) -> tuple[str, ...]:
    """Of `python -m`, in place of `module`."""
    return (__name__, str(path), module)


def _answer(listener: socket.socket) -> None:
    while True:
        line, _ = listener.accept()
        with line, suppress(OSError):  # who asked may be gone
            line.sendall(str(held_bytes()).encode())


def main() -> None:
    path, module, *arguments = sys.argv[1:]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    # It ends with the process, as which MODULE goes on.
    threading.Thread(target=_answer, args=(listener,), name="weighing", daemon=True).start()
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
