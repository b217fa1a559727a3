"""A head beside a verifier's target that learns while it serves: its versions, from a learner's folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from specwire.core.invalid import InvalidParameter
from specwire.rpc.versions import VersionFollower, learnt_of
from specwire.telemetry.metrics import Families, version_families
from specwire.v1 import common_pb2
from specwire.versions import HEAD, Current, VersionFolder, shown
from verify_service.engine.messages import HeadRenewed


class TakesHeads(Protocol):
    """A target beside a head that learns: a `specwire.lm.heads.slots.HeadedModel`, named here without torch."""

    load_version: Callable[[Path], Any] | None

    def take(self, head: Any, current: Current) -> None: ...


class HeadVersions:
    """The versions that a verifier's head has. `learnt`: what is told of the one in use.

    Args:
        model: what drafts by them.
        current: the version that was loaded with it. The folder may have a later one by now.
    """

    def __init__(self, folder: Path, model: TakesHeads, current: Current) -> None:
        self.learnt = learnt_of(current)
        self._folder = VersionFolder(folder)
        self._model = model
        self._number = current.version
        self._tenants = frozenset(current.tenants)
        self._follower: VersionFollower | None = None

    def follow(self, send: Callable[[HeadRenewed], None], tell: Callable[[common_pb2.Learnt], None]) -> None:
        """From now on have each version taken that comes into use, until `stop`.

        send: has the engine's thread do something. tell: tells peers what is in use.
        """

        async def take(current: Current) -> None:
            """Load it beside the one that drafts; sessions go on meanwhile, and after."""
            self._check_tenants(current)
            if self._model.load_version is None:
                raise AssertionError("a head that learns loads its next version")
            head = await asyncio.to_thread(self._model.load_version, self._folder.version(current.version))
            send(HeadRenewed(partial(self._model.take, head, current)))
            self.learnt = learnt_of(current)
            tell(self.learnt)

        self._follower = VersionFollower(self._folder, HEAD, self._number, take, ("specwire verify", "heads"))

    def _check_tenants(self, current: Current) -> None:
        """InvalidParameter for other ones, of a folder that was made again: running sessions are of those before."""
        if frozenset(current.tenants) != self._tenants:
            theirs, ours = shown(current.tenants), shown(sorted(self._tenants))
            raise InvalidParameter("tenants", f"are {theirs} by now, not {ours}: restart to follow them")

    def families(self) -> Families:
        follower = self._follower
        if follower is not None:
            yield from version_families(HEAD, follower.number, follower.swaps, follower.failures)

    async def stop(self) -> None:
        """Idempotent."""
        if self._follower is not None:
            await self._follower.stop()
