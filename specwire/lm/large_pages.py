"""Weights on large pages.

A forward reads all weights once. On pages of 4 KiB that takes more translations of addresses than a processor keeps,
and in a virtual machine each one that is missing costs two walks. So what a loaded model has filled is moved to pages
of 2 MiB, as `madvise(2)` does with MADV_COLLAPSE (Linux 6.1).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Of include/uapi/asm-generic/mman-common.h; Python's mmap does not name it.
MADV_COLLAPSE = 25
# Weights whose pages of 4 KiB a processor keeps the translations of: 2,048 entries (Intel's and AMD's second level).
SMALL_BYTES = 2048 * 4096
LARGE_PAGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
MAPPINGS = Path("/proc/self/maps")


class LargePages:
    """Moves what this process fills from now on to large pages. Where the system has or gives none, all stays as it is.

    Only ranges whose pages are all there are moved. Memory that was read and never written is there, too, and is the
    process's own only afterwards: up to a large page for each such range. Other threads may go on writing meanwhile.
    """

    def __init__(self) -> None:
        self._size = large_page_bytes()
        self._before = frozenset(_full(self._size))

    def take(self) -> int:
        """Returns how many bytes lie on large pages now."""
        libc, taken = ctypes.CDLL(None, use_errno=True), 0
        for address in sorted(frozenset(_full(self._size)) - self._before):
            if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(self._size), MADV_COLLAPSE) == 0:
                taken += self._size
            elif ctypes.get_errno() == errno.ENOMEM and address in _full(self._size):
                break  # none is left; a range that was freed or may not be moved says nothing of others
        return taken


def large_page_bytes() -> int:
    """0 where the system has none."""
    with suppress(OSError, ValueError):
        return int(LARGE_PAGE.read_text())
    return 0


def _full(size: int) -> Iterator[int]:
    """Addresses of large pages' places of which each small page is there, in memory that is this process's own."""
    if size == 0:
        return
    libc, resident = ctypes.CDLL(None), (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    every = len(resident)
    for first, last in _own_memory():
        for address in range(-(-first // size) * size, last - size + 1, size):
            found = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), resident) == 0
            if found and sum(page & 1 for page in bytes(resident)) == every:
                yield address


def _own_memory() -> Iterator[tuple[int, int]]:
    """First and last address of what was allocated: private, written, of no file and no stack."""
    with suppress(OSError):
        for line in MAPPINGS.read_bytes().split(b"\n"):  # a file's name may hold any other byte
            fields = line.split(None, 5)
            name = fields[5] if len(fields) > 5 else b""
            if fields[1:2] == [b"rw-p"] and fields[4] == b"0" and (not name or name.startswith((b"[heap]", b"[anon"))):
                first, _, last = fields[0].partition(b"-")
                yield int(first, 16), int(last, 16)
