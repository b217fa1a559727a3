"""Weights in a file that is mapped: made once of a model's own files, read where they lie, given back when read.

A runtime packs weights into an order of its own while it loads. What it reads of a file is given back meanwhile, so a
model is in memory once, and the next start converts nothing. Files are named by what they hold, are written beside and
renamed into place, and the ones unused for longest go where all of them take too much room.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import nn

logger = logging.getLogger(__name__)

# Bytes of all files, and of a model that is worth one.
MOST_BYTES, LEAST_BYTES = 16 << 30, 64 << 20
SUFFIX = ".weights"
# Counted up with each other order of tensors in a file (`_places`).
LAYOUT = 2
# Of each tensor: a line of a processor's cache.
ALIGNED = 64
# Seconds between two looks at what has been read.
INTERVAL_S = 0.05

_mapped: WeakKeyDictionary[nn.Module, mmap.mmap] = WeakKeyDictionary()


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/specwire."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specwire"


def fill(model: nn.Module, name: str, read_into: Callable[[str, torch.Tensor], None]) -> None:
    """Fill the model's parameters, which hold nothing yet, by a mapped file, or in memory where that cannot be.

    name: of what the file holds. read_into: fills a tensor for a parameter's name.
    """
    parameters = dict(model.named_parameters())
    places, size = _places(parameters)
    if size >= LEAST_BYTES:
        path = cache_folder() / f"{LAYOUT}-{name}{SUFFIX}"
        try:
            if not path.is_file() or path.stat().st_size != size:
                _write(path, size, {each: (place, parameters[each]) for each, place in places.items()}, read_into)
            memory = _map(path, size, mmap.MAP_PRIVATE)
        except OSError as reason:
            logger.info("weights are kept in memory, not in %s: %s", path, reason)
        else:
            whole = torch.frombuffer(memory, dtype=torch.uint8)
            for each, place in places.items():
                parameters[each].data = _tensor(whole, place, parameters[each])
            _mapped[model] = memory
            return
    for each, parameter in parameters.items():
        read_into(each, parameter.data)


@contextmanager
def given_back(model: nn.Module) -> Iterator[None]:
    """Give back, meanwhile and at the end, what was read of the model's mapped weights. Reading brings it back."""
    memory = _mapped.get(model)
    if memory is None:
        yield
        return
    done = threading.Event()

    def give_back() -> None:
        while not done.wait(INTERVAL_S):
            memory.madvise(mmap.MADV_DONTNEED)

    thread = threading.Thread(target=give_back, name="weights", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        memory.madvise(mmap.MADV_DONTNEED)


def give_back_freed() -> None:
    """Give what loading has freed back to the system, where the C library would keep it for what may come (glibc)."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _places(parameters: dict[str, nn.Parameter]) -> tuple[dict[str, int], int]:
    """Where each begins, and bytes of all.

    Matrices first, each dtype by itself, so that no scales lie between integers: those which are multiplied together
    lie together then, and are not copied for it.
    """
    places, at = {}, 0

    def kind(pair: tuple[str, nn.Parameter]) -> tuple[bool, str]:
        return pair[1].dim() < 2, str(pair[1].dtype)

    for name, parameter in sorted(parameters.items(), key=kind):
        places[name], at = at, at + -(-parameter.nbytes // ALIGNED) * ALIGNED
    return places, at


def _tensor(whole: torch.Tensor, place: int, like: torch.Tensor) -> torch.Tensor:
    return whole[place : place + like.nbytes].view(like.dtype).view(like.shape)


def _map(path: Path, size: int, kind: int) -> mmap.mmap:
    """Private ones can be written, too, but are not: PyTorch warns of memory that cannot."""
    with path.open("r+b" if kind == mmap.MAP_SHARED else "rb") as file:
        found = mmap.mmap(file.fileno(), size, kind, mmap.PROT_READ | mmap.PROT_WRITE)
    with suppress(OSError):
        os.utime(path)
    return found


def _write(
    path: Path,
    size: int,
    parameters: dict[str, tuple[int, nn.Parameter]],
    read_into: Callable[[str, torch.Tensor], None],
) -> None:
    """OSError where there is no room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _make_room(path.parent, size)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with beside.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        memory = _map(beside, size, mmap.MAP_SHARED)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        for name, (place, parameter) in parameters.items():
            read_into(name, _tensor(whole, place, parameter))
            memory.madvise(mmap.MADV_DONTNEED)  # what was written stays the file's
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _make_room(folder: Path, size: int) -> None:
    """Delete the files unused for longest while all would take more than MOST_BYTES; who maps one keeps it."""
    found = sorted(((each.stat().st_mtime, each) for each in folder.glob(f"*{SUFFIX}*")), reverse=True)
    for _, each in found:
        size += each.stat().st_size
        if size > MOST_BYTES:
            each.unlink(missing_ok=True)
