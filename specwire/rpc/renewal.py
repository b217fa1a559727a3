"""What is read of files and taken up again when they change: keys, tokens, certificates.

A value that was read of files has an `origin`, and whoever uses it asks for its `current` content each time: at a
call, at a handshake, when dialling. A process has one `Renewal`, which looks at the files every second. What is no
longer valid is ended by `on_change` (`specwire.rpc.server.RunningServer.recheck`).

A file that is gone, half written or wrong changes nothing: what was read before stays, and the log says so once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

from specwire.core.invalid import InvalidParameter

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Seconds between looks. docs/SECURITY.md promises that a revoked key ends its links within twice that.
LOOK_EVERY_S = 1.0
# A file that was changed so lately may change once more without another time stamp, so it is read again (as git does).
SETTLED_S = 2.0

# Of each file: time of change of content and of mode, inode, size; None where there is no file.
_State = tuple[tuple[int, int, int, int] | None, ...]


class Origin(Generic[T]):
    """Where a value was read, and what stands there by now: `latest`.

    Args:
        files: that `read` reads.
        read: raises InvalidParameter; so does the constructor, which reads for the first time.
    """

    def __init__(self, files: Iterable[str], read: Callable[[], T]) -> None:
        self.files = tuple(files)
        self._read = read
        self._seen: _State | None = self._state()
        self.latest = read()

    def look(self) -> bool:
        """Read again if a file has changed; returns whether the value has. Blocks.

        Raises:
            InvalidParameter: what stands there now is wrong; `latest` stays.
        """
        state = self._state()
        if state == self._seen:
            return False
        self._seen = state if _settled(state) else None
        fresh = self._read()
        if self._state() != state:  # it changed while it was read: the parts may not belong together
            self._seen = None
            return False
        changed = fresh != self.latest
        if changed:
            self.latest = fresh
        return changed

    def _state(self) -> _State:
        return tuple(_stamp(file) for file in self.files)


def _stamp(file: str) -> tuple[int, int, int, int] | None:
    try:
        told = Path(file).stat()
    except OSError:
        return None
    return told.st_mtime_ns, told.st_ctime_ns, told.st_ino, told.st_size


def _settled(state: _State) -> bool:
    latest = time.time_ns() - round(SETTLED_S * 1e9)
    return all(stamp is not None and max(stamp[:2]) < latest for stamp in state)


class Renewal:
    """Looks at files in a task of its own, which `stop` ends; without files there is no task.

    Args:
        origins: None for what was not read of files.
        on_change: called on the event loop when one of them has another value; must not block.
    """

    def __init__(self, origins: Iterable[Origin[Any] | None], on_change: Callable[[], None] = lambda: None) -> None:
        self._origins = [each for each in origins if each is not None]
        self._on_change = on_change
        self._troubles: dict[Origin[Any], str] = {}
        self._task = asyncio.create_task(self._run(), name="renewal of keys") if self._origins else None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                if await asyncio.to_thread(self._look):
                    self._on_change()
            except Exception:  # a bug of ours: files are still looked at
                logger.exception("keys and certificates could not be renewed")

    def _look(self) -> bool:
        """Whether anything has changed."""
        changed = [self._renewed(origin) for origin in self._origins]
        return any(changed)

    def _renewed(self, origin: Origin[Any]) -> bool:
        try:
            changed = origin.look()
        except InvalidParameter as error:
            if self._troubles.get(origin) != str(error):
                logger.warning("%s; what was read before stays in use", error)
            self._troubles[origin] = str(error)
            return False
        if changed:
            self._troubles.pop(origin, None)
            logger.warning("taken up again: %s", ", ".join(origin.files))
        return changed

    async def stop(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
