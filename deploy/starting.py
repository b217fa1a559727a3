"""What a stack that starts tells its user: lines, and on a terminal how far it is."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from deploy import stack
from deploy.options import StackOptions
from specwire.progress import REDRAW_S, Bar
from specwire.rpc.process import say

LINE = re.compile(r"([\w-]+): (loading|ready)\b")


class Starting:
    """A `stack.Report`: each line is said, and moves the bar where it tells of a service."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._loading: set[str] = set()
        self._ready: set[str] = set()

    def __call__(self, line: str) -> None:
        say(f"specwire: {line}")
        if (found := LINE.match(line)) is None:
            return
        role, state = found.groups()
        (self._ready if state == "ready" else self._loading).add(role)
        left = ", ".join(sorted(self._loading - self._ready))
        self._bar.at(len(self._ready), f"loading {left}" if left else "")


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
