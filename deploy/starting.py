"""What a stack that starts tells its user: lines, and on a terminal how far it is."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from deploy import stack
from deploy.options import StackOptions
from specwire.progress import REDRAW_S, Bar
from specwire.rpc.process import say

READY = re.compile(r"[\w-]+: ready\b")


class Starting:
    """A `stack.Report`: each line is said, and moves the bar where it tells that a service is ready."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar

    def __call__(self, line: str) -> None:
        say(f"specwire: {line}")
        if READY.match(line):
            self._bar.update()


async def start_shown(options: StackOptions, folder: Path) -> stack.Stack:
    """`stack.start`, told to whoever watches. Raises StackError."""
    with Bar("starting", len(options.services())) as bar:
        ticking = asyncio.create_task(_tick(bar))
        try:
            return await stack.start(options, folder, Starting(bar))
        finally:
            ticking.cancel()


async def _tick(bar: Bar) -> None:
    """Models load for a while in which nothing is said; time goes on."""
    while True:
        await asyncio.sleep(REDRAW_S)
        bar.tick()
