"""What a stack that starts tells its user: lines, and on a terminal how far it is."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from deploy.stack import stack
from deploy.stack.fetching import Fetching, hub_cache
from deploy.stack.options import StackOptions
from specwire.progress import REDRAW_S, Bar
from specwire.rpc.process import say

LINE = re.compile(r"([\w-]+): (loading|ready)\b")


class Starting:
    """A `stack.Report`: each line is said, and moves the bar where it tells of a service."""

    def __init__(self, bar: Bar, fetching: Fetching) -> None:
        self._bar = bar
        self._fetching = fetching
        self._loading: set[str] = set()
        self._ready: set[str] = set()

    def __call__(self, line: str) -> None:
        say(f"specwire: {line}")
        if (found := LINE.match(line)) is None:
            return
        role, state = found.groups()
        (self._ready if state == "ready" else self._loading).add(role)
        self.tick()

    def tick(self) -> None:
        """Time has passed, in which more may have been fetched."""
        left = ", ".join(sorted(self._loading - self._ready))
        fetched = self._fetching.text() if left else ""
        self._bar.at(len(self._ready), ", ".join(filter(None, (left and f"loading {left}", fetched))))


async def start_shown(options: StackOptions, folder: Path) -> stack.Stack:
    """`stack.start`, told to whoever watches. Raises StackError."""
    services = options.services()
    fetching = Fetching((service.model for service in services.values()), hub_cache())
    with Bar("starting", len(services)) as bar:
        starting = Starting(bar, fetching)
        ticking = asyncio.create_task(_tick(starting))
        try:
            return await stack.start(options, folder, starting)
        finally:
            ticking.cancel()


async def _tick(starting: Starting) -> None:
    """Models load for a while in which nothing is said."""
    while True:
        await asyncio.sleep(REDRAW_S)
        starting.tick()
