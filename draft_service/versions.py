"""A drafter whose weights change while it serves: another model may take its place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from draft_service.service import DrafterThread, DraftHandler
from specwire.core.invalid import InvalidParameter
from specwire.registry.entry import NO_LOAD, Load
from specwire.telemetry.metrics import Families
from specwire.versions import DRAFT, Current, VersionError, VersionFolder


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
        try:
            await self.handler.stop()
        finally:
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


def followed(model: str | None, follow: Path | None = None) -> Path | None:
    """The learner's folder whose versions are to be served: `follow`, else the model if that is one; None without."""
    if follow is None and model and VersionFolder(Path(model).expanduser()).begun:
        return Path(model).expanduser()
    return follow


def first_model(folder: Path, model: str | None) -> tuple[str, Current | None]:
    """What to serve at first: a model, and which version of the folder it is; None where it is none of its.

    model: what is served while the folder has no version yet; not itself. Raises InvalidParameter.
    """
    versions = VersionFolder(folder)
    try:
        current = versions.current(DRAFT)
    except VersionError as error:
        raise InvalidParameter("follow", str(error)) from None
    if current is not None:
        return str(versions.version(current.version)), current
    other = followed(model)
    if other is not None and other.resolve() != folder.resolve():
        message = f"{other} is a learner's folder, and --follow {folder} another: name a model to begin with"
        raise InvalidParameter("MODEL", message)
    if not model or other is not None:
        message = f"{folder} has no version yet: start `specwire learn --out {folder}`, or name MODEL to begin with"
        raise InvalidParameter("follow", message)
    return model, None
