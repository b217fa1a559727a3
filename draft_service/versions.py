"""A drafter whose weights change while it serves: it follows the folder of a learner (`specwire.versions`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from draft_service.service import DrafterThread, DraftHandler
from specwire.core.invalid import InvalidParameter
from specwire.registry.entry import NO_LOAD, Load
from specwire.rpc.process import keep_loaded, one_line, say
from specwire.telemetry.metrics import Families, counter, gauge
from specwire.versions import Current, VersionError, VersionFolder

# Seconds between two looks at what is in use.
WATCH_S = 2.0


class DrafterFigures:
    """Where a drafter's figures are read; set by the thread that makes what knows them."""

    def __init__(self) -> None:
        self.families: Callable[[], Families] = lambda: ()
        self.load: Callable[[], Load] = lambda: NO_LOAD


class LoadedDrafter(NamedTuple):
    """A drafter whose thread runs, its handler, and its figures."""

    thread: DrafterThread
    handler: DraftHandler
    figures: DrafterFigures

    async def stop(self) -> None:
        """End the thread, and the handler's tasks. Idempotent."""
        await self.handler.stop()
        await self.thread.stop()


class ServedDrafter:
    """The drafter that links get now. Another one may take its place, which is asked for by `replace`."""

    def __init__(self, loaded: LoadedDrafter) -> None:
        self.now = loaded
        self._replaced = asyncio.Event()

    def replace(self, loaded: LoadedDrafter) -> LoadedDrafter:
        """Serve `loaded` from now on; returns what served until now, which the caller stops."""
        former, self.now = self.now, loaded
        self._replaced.set()
        self._replaced = asyncio.Event()
        return former

    async def failed(self) -> str:
        """Return, with the reason, once the drafter that serves then cannot go on."""
        while True:
            failing = asyncio.ensure_future(self.now.thread.failed())
            replaced = asyncio.ensure_future(self._replaced.wait())
            try:
                await asyncio.wait({failing, replaced}, return_when=asyncio.FIRST_COMPLETED)
                if not replaced.done():
                    return failing.result()
            finally:
                failing.cancel()
                replaced.cancel()


class VersionFollower:
    """Loads each version that comes into use beside the one that serves, then has it served. Owns its task.

    A version that cannot be loaded is told once, and the present one stays.

    Args:
        number: of the version that serves; None where it is none of the folder's.
        load: loads the model at a path under this name, as it is served here.
        swap: has it served from now on, and ends the former one's links; returns that one.
    """

    def __init__(
        self,
        folder: VersionFolder,
        number: int | None,
        served: ServedDrafter,
        load: Callable[[Path, str], Awaitable[LoadedDrafter]],
        swap: Callable[[LoadedDrafter], LoadedDrafter],
    ) -> None:
        self.number = number
        self.swaps = self.failures = 0
        self._folder = folder
        self._served = served
        self._load = load
        self._swap = swap
        self._trouble = ""
        self._refused: int | None = None
        self._task = asyncio.create_task(self._run(), name="versions")

    def families(self) -> Families:
        yield gauge("draft_version", "Of the learner's folder, which serves; -1 for none.", self._shown)
        yield counter("draft_version_swaps_total", "Versions that were taken while it served.", self.swaps)
        yield counter("draft_version_failures_total", "Versions that could not be taken.", self.failures)

    @property
    def _shown(self) -> int:
        return -1 if self.number is None else self.number

    async def stop(self) -> None:
        """Follow no more; a version that loads is given up. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except VersionError as error:
                self._tell(str(error))
            await asyncio.sleep(WATCH_S)

    async def look(self) -> None:
        """Take the version that is in use, if it is another one. Raises VersionError."""
        current = await asyncio.to_thread(self._folder.current)
        if current is None or current.version in (self.number, self._refused):
            return
        try:
            await self._take(current)
        except Exception as error:  # whatever loading raises: the present one goes on
            self.failures += 1
            self._refused = current.version
            self._tell(f"version {current.version} cannot be taken: {one_line(error)}")
        else:
            self._trouble, self._refused = "", None

    async def _take(self, current: Current) -> None:
        loaded = await self._load(self._folder.version(current.version), name_of(current))
        ours, theirs = (each.handler.info.vocabulary_fingerprint for each in (self._served.now, loaded))
        if ours != theirs:
            await loaded.stop()
            raise InvalidParameter("vocabulary", "is another one than this drafter's")
        former = self._swap(loaded)
        self.number = current.version
        self.swaps += 1
        await former.stop()
        del former
        keep_loaded()  # and lets go of the former one
        say(f"specwire draft: {name_of(current)} is in use")

    def _tell(self, trouble: str) -> None:
        if trouble != self._trouble:
            say(f"specwire draft: follow: {trouble}")
        self._trouble = trouble


def name_of(current: Current) -> str:
    """What a version is called, by the model that the learning began with."""
    return f"{Path(current.draft).name}@{current.version}"


def first_model(folder: Path, model: str | None) -> tuple[str, str, int | None]:
    """What to serve at first: a model, its name ("" for its own) and its number in the folder, if it is of there.

    model: what is served while the folder has no version yet. Raises InvalidParameter.
    """
    try:
        current = VersionFolder(folder).current()
    except VersionError as error:
        raise InvalidParameter("follow", str(error)) from None
    if current is not None:
        return str(VersionFolder(folder).version(current.version)), name_of(current), current.version
    if not model:
        message = f"{folder} has no version yet: start `specwire learn --out {folder}`, or name MODEL to begin with"
        raise InvalidParameter("follow", message)
    return model, "", None
