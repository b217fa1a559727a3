"""How a command that owns processes runs: signals, errors in one line, and nothing left behind.

The first SIGINT or SIGTERM cancels the work, which cleans up; the second ends everything on the spot.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from deploy.processes import adopt_orphans, end_descendants
from specwire.rpc.process import SIGNALS, one_line, say

Work = Callable[[Path], Awaitable[int]]


def run_owned(name: str, work: Work) -> int:
    """Run `work` with a private folder (short path, removed afterwards); returns the exit code.

    Whatever still lives below this process at the end is killed, so only a process's main program may call this.
    """
    adopt_orphans()
    folder = Path(tempfile.mkdtemp(prefix="specwire-"))
    try:
        return asyncio.run(_signalled(name, work, folder))
    finally:
        _leave_nothing(folder)


async def _signalled(name: str, work: Work, folder: Path) -> int:
    """Run `work`, cancelled by a signal; 128 + the signal's number is then the exit code unless `work` returns one."""
    task = asyncio.ensure_future(work(folder))
    received: list[int] = []

    def on_signal(number: int) -> None:
        if received:
            _leave_nothing(folder)
            os._exit(128 + number)
        received.append(number)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await task
    except asyncio.CancelledError:
        return 128 + (received[0] if received else signal.SIGINT)
    except Exception as error:  # whatever stops a command is one line to its user
        say(f"specwire {name}: error: {one_line(error)}")
        return 1


def _leave_nothing(folder: Path) -> None:
    end_descendants(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)
