"""The same function of many things, in as many processes as there are cores: simulations, not measurements."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

from deploy.stack.options import cores

# So many take less time than starting a process.
FEW = 2

Asked = TypeVar("Asked")
Found = TypeVar("Found")


def in_processes(
    work: Callable[[Asked], Found], asked: Sequence[Asked], processes: int | None = None
) -> Generator[Found, None, None]:
    """What `work` finds of each, in their order. Here where they are few or one process is wanted.

    Close it, or let it end, before the last one: what has not begun is left.
    """
    processes = cores() if processes is None else processes
    if len(asked) <= FEW or processes == 1:
        yield from map(work, asked)
        return
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_end_with_ctrl_c)
    try:
        yield from pool.map(work, asked)
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_ctrl_c() -> None:
    """A terminal sends it to all: the one that asked tells about it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
