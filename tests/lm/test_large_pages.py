"""Memory that was filled is moved to large pages, with what it holds; where there are none all stays as it is."""

import ctypes
import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from specwire.lm import large_pages
from specwire.lm.large_pages import MADV_COLLAPSE, LargePages, large_page_bytes

ROOM = 8


def gives_large_pages() -> bool:
    """Whether the system moves memory of its own choice; what it would move is not asked of the code under test."""
    if not (size := large_page_bytes()):
        return False
    memory = filled(2 * size)
    memory[:] = 1
    address = -(-memory.ctypes.data // size) * size
    asked = ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), MADV_COLLAPSE)
    return bool(asked == 0)


def filled(count: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(-1, count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def on_large_pages(memory: npt.NDArray[np.uint8]) -> int:
    """Bytes of the mappings that hold it, as the kernel counts them."""
    first, found, inside = memory.ctypes.data, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, _, stop = head.partition("-")
            inside = int(start, 16) < first + memory.nbytes and first < int(stop, 16)
        elif inside and head == "AnonHugePages:":
            found += int(line.split()[1]) * 1024
    return found


needs_large_pages = pytest.mark.skipif(not gives_large_pages(), reason="this system moves no memory to large pages")


@needs_large_pages
def test_what_is_filled_meanwhile_is_moved_and_holds_what_it_held() -> None:
    size = large_page_bytes()
    pages = LargePages()
    memory = filled(ROOM * size)
    memory[:] = np.arange(memory.size, dtype=np.uint32).astype(np.uint8)
    before = on_large_pages(memory)
    assert pages.take() >= (ROOM - 1) * size
    assert on_large_pages(memory) >= before + (ROOM - 1) * size or before >= (ROOM - 1) * size
    assert np.array_equal(memory, np.arange(memory.size, dtype=np.uint32).astype(np.uint8))


@needs_large_pages
def test_what_was_filled_before_and_what_is_not_full_is_left() -> None:
    size = large_page_bytes()
    old = filled(ROOM * size)
    old[:] = 1
    on_large_before = on_large_pages(old)
    pages, sparse = LargePages(), filled(ROOM * size)
    sparse[:: 2 * mmap.PAGESIZE] = 1
    sparse_before = on_large_pages(sparse)
    pages.take()
    assert (on_large_pages(old), on_large_pages(sparse)) == (on_large_before, sparse_before)


@needs_large_pages
def test_memory_that_may_not_be_moved_keeps_no_other_from_it() -> None:
    size = large_page_bytes()
    pages, either = LargePages(), (filled(ROOM * size), filled(ROOM * size))
    for memory in either:
        memory[:] = 1
    kept, moved = sorted(either, key=lambda memory: memory.ctypes.data)  # lower addresses come first
    first = -(-kept.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    span = (kept.ctypes.data + kept.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    assert ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(span), mmap.MADV_NOHUGEPAGE) == 0
    pages.take()
    assert on_large_pages(moved) >= (ROOM - 1) * size


def test_a_file_whose_name_is_no_text_hides_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mappings = tmp_path / "maps"
    mappings.write_bytes(
        b"1000-3000 rw-p 0 0:0 7 /a\xff\f b\n4000-6000 rw-p 0 0:0 0 \n7000-8000 rw-p 0 0:0 0 [stack]\n"
    )
    monkeypatch.setattr(large_pages, "MAPPINGS", mappings)
    assert [*large_pages._own_memory()] == [(0x4000, 0x6000)]


def test_a_system_without_large_pages_moves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "LARGE_PAGE", tmp_path / "none")
    assert LargePages().take() == 0


def test_a_system_that_does_not_tell_its_mappings_moves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_pages, "MAPPINGS", tmp_path / "none")
    assert LargePages().take() == 0
