"""A head beside a verifier's target that learns while it serves: its versions, from a learner's folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from specwire.rpc.versions import VersionFollower, learnt_of
from specwire.telemetry.metrics import Families, version_families
from specwire.v1 import common_pb2
from specwire.versions import HEAD, Current, VersionFolder
from verify_service.engine.messages import HeadRenewed


class HeadedModel(Protocol):
    """A target beside a head that learns; see `specwire.lm.heads.slots.HeadedModel`."""

    version: int | None
    another: Callable[[Path], Any] | None

    def take(self, head: Any, version: int) -> None: ...


class HeadVersions:
    """The versions that a verifier's head has. `learnt`: what is told of the one in use.

    Args:
        model: what drafts by them, whose head is a version by now.
    """

    def __init__(self, folder: Path, model: HeadedModel) -> None:
        self.learnt = common_pb2.Learnt()
        self._folder = VersionFolder(folder)
        self._model = model
        self._follower: VersionFollower | None = None
        current = self._folder.current(HEAD)
        if current is not None:
            self.learnt = learnt_of(current)

    def follow(self, send: Callable[[HeadRenewed], None], tell: Callable[[common_pb2.Learnt], None]) -> None:
        """From now on have each version taken that comes into use, until `stop`.

        send: has the engine's thread do something. tell: tells peers what is in use.
        """

        async def take(current: Current) -> None:
            """Load it beside the one that drafts; sessions go on meanwhile, and after."""
            if self._model.another is None:
                raise AssertionError("a head that learns loads its next version")
            head = await asyncio.to_thread(self._model.another, self._folder.version(current.version))
            send(HeadRenewed(partial(self._model.take, head, current.version)))
            self.learnt = learnt_of(current)
            tell(self.learnt)

        follower = VersionFollower(self._folder, HEAD, self._model.version, take, ("specwire verify", "heads"))
        self._follower = follower

    def families(self) -> Families:
        follower = self._follower
        if follower is not None:
            yield from version_families(HEAD, follower.number, follower.swaps, follower.failures)

    async def stop(self) -> None:
        """Idempotent."""
        if self._follower is not None:
            await self._follower.stop()
