"""A learner's folder (`specwire.versions`), followed while a service runs, and what is told of its versions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from specwire.rpc.process import one_line, say
from specwire.v1 import common_pb2
from specwire.versions import ANONYMOUS, Current, Kind, VersionError, VersionFolder

# Seconds between two looks at what is in use.
WATCH_S = 2.0


class VersionFollower:
    """Has each version taken that comes into use. Owns its task.

    A version that cannot be taken is told once, and the present one stays.

    Args:
        kind: what the folder must have versions of.
        number: of the version that serves; None where it is none of the folder's.
        take: has a version served from now on, once it is loaded.
        option: whose it is, for people: the command, and its option.
    """

    def __init__(
        self,
        folder: VersionFolder,
        kind: Kind,
        number: int | None,
        take: Callable[[Current], Awaitable[None]],
        option: tuple[str, str],
    ) -> None:
        self.number = number
        self.swaps = self.failures = 0
        self._folder = folder
        self._kind = kind
        self._take = take
        self._command, self._option = option
        self._trouble = ""
        self._refused: int | None = None
        self._looking = asyncio.Lock()
        self._task = asyncio.create_task(self._run(), name="versions")

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
        async with self._looking:
            await self._look()

    async def _look(self) -> None:
        current = await asyncio.to_thread(self._folder.current, self._kind)
        if current is None or current.version in (self.number, self._refused):
            return
        try:
            await self._take(current)
        except Exception as error:  # whatever loading raises: the present one goes on
            self.failures += 1
            self._refused = current.version
            self._tell(f"version {current.version} cannot be taken: {one_line(error)}")
            return
        self.number, self._trouble, self._refused = current.version, "", None
        self.swaps += 1
        say(f"{self._command}: {current.name} is in use")

    def _tell(self, trouble: str) -> None:
        if trouble != self._trouble:
            say(f"{self._command}: {self._option}: {trouble}")
        self._trouble = trouble


def learnt_of(current: Current) -> common_pb2.Learnt:
    return common_pb2.Learnt(
        version=current.name,
        tenants=current.tenants,
        acceptance_before=current.before,
        acceptance_after=current.after,
        loss_before=current.loss_before,
        loss_after=current.loss_after,
    )


def agreed(info: common_pb2.GetModelInfoResponse | None, tenant: str) -> bool:
    """Whether sessions of a tenant may be proposed what a service has learnt; tenant: "" for callers without keys."""
    return info is None or not info.HasField("learnt") or (tenant or ANONYMOUS) in info.learnt.tenants
