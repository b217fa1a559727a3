"""A drafter in the orchestrator's process: what gRPC would carry is handed over as it is."""

from __future__ import annotations

import asyncio

from draft_service.reception import DraftReception, ModelDrafter, OrchestratorLink
from orchestrator.peers import DrafterPeer
from orchestrator.pool import StartError
from orchestrator.sessions import Orchestrator
from specwire.rpc.process import say
from specwire.v1 import draft_pb2


class LocalDrafter:
    """Owns a drafter; implements orchestrator.link.Line.

    Invariant: `_peer` is the orchestrator's from `join` until the drafter fails, is cut, or is stopped.
    """

    address = "the drafter in this process"

    def __init__(self, drafter: ModelDrafter, reception: DraftReception) -> None:
        self._drafter = drafter
        self._reception = reception
        self._loop = asyncio.get_running_loop()
        # Later, not at once: a refusal would reach the session in the middle of the event that it answers.
        self._link = OrchestratorLink(lambda message: self._loop.call_soon(self._hear, message))
        self._orchestrator: Orchestrator | None = None
        self._peer: DrafterPeer | None = None
        self._watching: asyncio.Task[None] | None = None
        self._up = True

    @property
    def up(self) -> bool:
        return self._up

    def join(self, orchestrator: Orchestrator) -> None:
        """Draft for the orchestrator's sessions; StartError if its target has another vocabulary."""
        self._orchestrator = orchestrator
        self._peer = orchestrator.pool.admit(self, self._reception.info)
        if self._peer.refusal is not None:
            raise StartError(self._peer.refusal)
        self._watching = asyncio.create_task(self._watch())

    def send(self, part: draft_pb2.ConnectDraftRequest) -> None:
        if self._up:
            self._reception.take(part, self._link)

    def cut(self, reason: str) -> None:
        """For a fault of our own: sessions go on without a drafter."""
        if self._up:
            say(f"specwire edge: drafting has ended: {reason}")
            self._loop.call_soon(self._leave)

    def _hear(self, message: draft_pb2.ConnectDraftResponse) -> None:
        if self._peer is not None:
            self._peer.on_message(message)

    async def _watch(self) -> None:
        self.cut(await self._drafter.failed())

    def _leave(self) -> None:
        self._up = False
        peer, self._peer = self._peer, None
        if self._orchestrator is not None and peer is not None:
            self._reception.lose(self._link)
            self._orchestrator.pool.dismiss(peer)

    async def stop(self) -> None:
        """Idempotent; sessions that run go on without a drafter."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self._leave()
        await self._reception.stop()
        await self._drafter.stop()
