"""An orchestrator's end of a link, and the text that a scripted target would write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc.aio

from draft_service.server import RunningDrafter, start
from specwire.core.law.sampling import Sampling
from specwire.rpc.channel import channel_options
from specwire.rpc.convert import proposal_from_wire, sampling_to_wire
from specwire.rpc.server_options import ModelServiceOptions
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc

LIMIT_S = 120.0
GREEDY = Sampling()


def pace(chunk: int = 4, run_ahead: int = 4, branches: int = 1) -> draft_pb2.Pace:
    return draft_pb2.Pace(chunk=chunk, run_ahead=run_ahead, branches=branches)


class Peer:
    """A link to a drafter. Every wait has a limit."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = draft_pb2_grpc.DraftServiceStub(channel)
        self.call = self.stub.Connect()
        self.fingerprint = ""
        self._proposals: list[common_pb2.Proposal] = []
        self._refused: list[common_pb2.Refused] = []
        self.opened: list[int] = []

    async def info(self, known: str = "") -> common_pb2.GetModelInfoResponse:
        request = common_pb2.GetModelInfoRequest(known_tokenizer_hash=known)
        response: common_pb2.GetModelInfoResponse = await self.stub.GetModelInfo(request, timeout=LIMIT_S)
        self.fingerprint = response.vocabulary_fingerprint
        return response

    async def send(self, message: draft_pb2.ConnectDraftRequest) -> None:
        await asyncio.wait_for(self.call.write(message), LIMIT_S)

    def opening(
        self, handle: int, tokens: Sequence[int], speed: draft_pb2.Pace, sampling: Sampling = GREEDY
    ) -> draft_pb2.OpenDraft:
        return draft_pb2.OpenDraft(
            handle=handle,
            tokens=tokens,
            sampling=sampling_to_wire(sampling),
            vocabulary_fingerprint=self.fingerprint,
            pace=speed,
        )

    async def open(
        self, handle: int, tokens: Sequence[int], speed: draft_pb2.Pace | None = None, sampling: Sampling = GREEDY
    ) -> None:
        opening = self.opening(handle, tokens, speed or pace(), sampling)
        await self.send(draft_pb2.ConnectDraftRequest(opens=[opening]))

    async def advance(
        self, handle: int, position: int, tokens: Sequence[int], speed: draft_pb2.Pace | None = None
    ) -> None:
        part = draft_pb2.Advance(handle=handle, position=position, tokens=tokens, pace=speed or pace())
        await self.send(draft_pb2.ConnectDraftRequest(advances=[part]))

    async def close(self, handle: int) -> None:
        await self.send(draft_pb2.ConnectDraftRequest(closes=[common_pb2.Close(handle=handle)]))

    async def _read(self) -> None:
        message = await asyncio.wait_for(self.call.read(), LIMIT_S)
        if not isinstance(message, draft_pb2.ConnectDraftResponse):
            raise EOFError(f"the drafter closed the stream: {await self.call.code()}")
        self.opened += [opened.handle for opened in message.opened]
        self._proposals += message.proposals
        self._refused += message.refused

    async def proposal(self, handle: int) -> common_pb2.Proposal:
        """The next proposal for a session."""
        while not any(proposal.handle == handle for proposal in self._proposals):
            await self._read()
        found = next(proposal for proposal in self._proposals if proposal.handle == handle)
        self._proposals.remove(found)
        return found

    async def refused(self, handle: int) -> common_pb2.Refused:
        while not any(refused.handle == handle for refused in self._refused):
            await self._read()
        found = next(refused for refused in self._refused if refused.handle == handle)
        self._refused.remove(found)
        return found

    async def quiet(self, handle: int) -> bool:
        """Whether nothing is proposed for a session: a second session's proposal comes first."""
        other = handle + 1000
        await self.open(other, [1], pace(1, 1))
        await self.proposal(other)
        await self.close(other)
        return not any(proposal.handle == handle for proposal in self._proposals)


@asynccontextmanager
async def serving(model: str, slots: int = 4, context: int | None = None) -> AsyncIterator[RunningDrafter]:
    running = await start(ModelServiceOptions(model, slots=slots, context=context))
    try:
        yield running
    finally:
        await running.stop(0.0)


@asynccontextmanager
async def connected(running: RunningDrafter) -> AsyncIterator[Peer]:
    async with grpc.aio.insecure_channel(running.address, options=channel_options(running.address)) as channel:
        peer = Peer(channel)
        await peer.info()
        yield peer
        peer.call.cancel()


def tokens_of(proposal: common_pb2.Proposal) -> list[int]:
    return list(proposal_from_wire(proposal).tokens)
