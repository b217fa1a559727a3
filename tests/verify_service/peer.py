"""An orchestrator's end of a verifier's link, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from specwire.core.law.sampling import Sampling
from specwire.rpc.channel import channel_options
from specwire.rpc.convert import sampling_to_wire
from specwire.rpc.server_options import ModelServiceOptions
from specwire.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from verify_service.engine.messages import QueuePatience
from verify_service.server import PATIENCE, RunningVerifier, start

PATIENCE_S = 120.0
GREEDY = Sampling()
Call = grpc.aio.StreamStreamCall[verify_pb2.ConnectVerifyRequest, verify_pb2.ConnectVerifyResponse]


@asynccontextmanager
async def serving(
    model: str, slots: int = 4, context: int | None = 512, patience: QueuePatience = PATIENCE
) -> AsyncIterator[RunningVerifier]:
    running = await start(ModelServiceOptions(model, slots=slots, context=context), patience=patience)
    try:
        yield running
    finally:
        await running.stop()


@asynccontextmanager
async def stub_of(running: RunningVerifier) -> AsyncIterator[verify_pb2_grpc.VerifyServiceStub]:
    async with grpc.aio.insecure_channel(running.address, channel_options(running.address)) as channel:
        yield verify_pb2_grpc.VerifyServiceStub(channel)


@asynccontextmanager
async def connected(running: RunningVerifier) -> AsyncIterator[Peer]:
    async with stub_of(running) as stub:
        call = stub.Connect()
        try:
            yield Peer(call, running.info)
        finally:
            call.cancel()


class Peer:
    """Sends messages and gathers what comes back, by handle."""

    def __init__(self, call: Call, info: common_pb2.GetModelInfoResponse) -> None:
        self.call = call
        self.info = info
        self.tokens: dict[int, list[int]] = {}
        self.outcomes: dict[int, list[int]] = {}
        self.finished: dict[int, int] = {}
        self.opened: list[int] = []
        self.refused: list[common_pb2.Refused] = []
        self.timings: list[verify_pb2.StepTimings] = []

    async def send(self, **parts: Any) -> None:
        await self.call.write(verify_pb2.ConnectVerifyRequest(**parts))

    async def open(self, handle: int, tokens: Sequence[int], drawing: Sampling = GREEDY, **changes: Any) -> None:
        await self.send(opens=[open_message(handle, tokens, self.info, drawing, **changes)])

    async def receive(self) -> verify_pb2.ConnectVerifyResponse:
        async with asyncio.timeout(PATIENCE_S):
            message = await self.call.read()
        assert isinstance(message, verify_pb2.ConnectVerifyResponse), "the stream has ended"
        self.opened += [each.handle for each in message.opened]
        self.refused += message.refused
        if message.HasField("timings"):
            self.timings.append(message.timings)
        for verdict in message.verdicts:
            self.tokens.setdefault(verdict.handle, []).extend(verdict.tokens)
            self.outcomes.setdefault(verdict.handle, []).extend(verdict.outcomes)
            if verdict.finish_reason:
                self.finished[verdict.handle] = verdict.finish_reason
        return message

    async def until_finished(self, *handles: int) -> None:
        while not all(handle in self.finished for handle in handles):
            await self.receive()

    async def refusal(self) -> common_pb2.Refused:
        while not self.refused:
            await self.receive()
        return self.refused.pop(0)


def open_message(
    handle: int,
    tokens: Sequence[int],
    info: common_pb2.GetModelInfoResponse,
    drawing: Sampling = GREEDY,
    **changes: Any,
) -> verify_pb2.Open:
    """A valid Open; `changes` replace its fields."""
    fields: dict[str, Any] = {
        "handle": handle,
        "session_id": f"session-{handle}",
        "fence": 1,
        "attach": 1,
        "tokens": tokens,
        "prompt_length": len(tokens),
        "sampling": sampling_to_wire(drawing),
        "stopping": common_pb2.Stopping(max_tokens=40),
        "progress": verify_pb2.Progress(credit=1 << 20),
        "vocabulary_fingerprint": info.vocabulary_fingerprint,
        **changes,
    }
    return verify_pb2.Open(**fields)
