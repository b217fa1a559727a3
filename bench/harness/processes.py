"""The same function of many things, in a process for each core: simulations, not measurements."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from typing import TypeVar

from specwire.options import cores

# Fewer are soon done, beside the seconds that a process takes to start.
FEW = 2
# A process has imported torch: some 350 MB.
MOST_PROCESSES = 8

Asked = TypeVar("Asked")
Found = TypeVar("Found")


def usual_processes() -> int:
    """One for each core of this process, within MOST_PROCESSES."""
    return min(cores(), MOST_PROCESSES)


def in_processes(
    work: Callable[[Asked], Found], asked: Sequence[Asked], processes: int | None = None
) -> Generator[Found, None, None]:
    """What `work` finds of each, in their order. `work` runs in this process if they are few, or `processes` is 1.

    Closed early, it waits for what runs, and leaves the rest. Its processes end with this one, however that ends.
    """
    processes = usual_processes() if processes is None else processes
    if len(asked) <= FEW or processes == 1:
        yield from map(work, asked)
        return
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"), initializer=_begin)
    try:
        yield from pool.map(work, asked)
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # A terminal's Ctrl-C reaches all processes; the parent tells about it.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end_with_parent() -> None:
    """One that was killed closes no pool, and its workers would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
