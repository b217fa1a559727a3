"""A scripted GenerationService that records its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import grpc.aio
from google.protobuf.message import Message

from specwire.core.text import hash_of
from specwire.rpc.errors import StatusError
from specwire.rpc.server import Service, serve
from specwire.v1 import common_pb2, generation_pb2, generation_pb2_grpc

STARTED = generation_pb2.Started(
    session_id="s-1",
    prompt_tokens=2,
    sampling=common_pb2.Sampling(temperature=0.5, top_p=0.9, seed=7, rule="coupled"),
    prompt_hash=hash_of((1, 2)),
)
FIRST = generation_pb2.Chunk(
    position=2,
    tokens=[5, 6],
    outcomes=[common_pb2.OUTCOME_ACCEPTED, common_pb2.OUTCOME_BONUS],
    text="ab",
    text_ends=[1, 2],
    accepted=1,
    bonus=1,
    timings=generation_pb2.ChunkTimings(forward_ended_ns=1, verdict_received_ns=2, durable_ns=3, emitted_ns=4),
)
SECOND = generation_pb2.Chunk(
    position=4, tokens=[7], outcomes=[common_pb2.OUTCOME_DIRECT], text="", text_ends=[3], direct=1
)
FINISHED = generation_pb2.Finished(
    reason=common_pb2.FINISH_REASON_LENGTH,
    text="c",
    text_length=3,
    stats=generation_pb2.Stats(prompt_tokens=2, output_tokens=3, target_forwards=2, accepted=1, bonus=1, direct=1),
)


R = TypeVar("R", bound=Message)


def set_event(response: R, event: Message) -> R:
    """`response` with the event in the field that bears its name."""
    getattr(response, type(event).__name__.lower()).CopyFrom(event)
    return response


@dataclass
class Scripted(generation_pb2_grpc.GenerationServiceServicer):
    """`events` are streamed; then the stream fails with `failure`, hangs, or ends."""

    events: Sequence[Message] = (STARTED, FIRST, SECOND, FINISHED)
    failure: StatusError | None = None
    hangs: bool = False
    asked: list[object] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        async for event in self._play(request):
            yield set_event(generation_pb2.GenerateResponse(), event)

    async def Watch(
        self, request: generation_pb2.WatchRequest, context: object
    ) -> AsyncIterator[generation_pb2.WatchResponse]:
        async for event in self._play(request):
            yield set_event(generation_pb2.WatchResponse(), event)

    async def _play(self, request: object) -> AsyncIterator[Message]:
        self.asked.append(request)
        try:
            for event in self.events:
                yield event
            if self.failure is not None:
                raise self.failure
            if self.hangs:
                await asyncio.sleep(60)
        finally:
            self.left.set()

    async def GetSession(
        self, request: generation_pb2.GetSessionRequest, context: object
    ) -> generation_pb2.GetSessionResponse:
        self._ask(request)
        return generation_pb2.GetSessionResponse(prompt_tokens=2, tokens=[1, 2, 5], fence=9)

    async def Cancel(self, request: generation_pb2.CancelRequest, context: object) -> generation_pb2.CancelResponse:
        self._ask(request)
        return generation_pb2.CancelResponse()

    async def GetServerInfo(
        self, request: generation_pb2.GetServerInfoRequest, context: object
    ) -> generation_pb2.GetServerInfoResponse:
        self._ask(request)
        return generation_pb2.GetServerInfoResponse(durability="memory")

    async def ScoreText(
        self, request: generation_pb2.ScoreTextRequest, context: object
    ) -> generation_pb2.ScoreTextResponse:
        self._ask(request)
        part = generation_pb2.PartScore(tokens=[4, 5], log_probabilities=[-0.5, -1.0])
        return generation_pb2.ScoreTextResponse(prefix_tokens=2, scores=[generation_pb2.TextScore(parts=[part, part])])

    def _ask(self, request: object) -> None:
        self.asked.append(request)
        if self.failure is not None:
            raise self.failure


@asynccontextmanager
async def serving(servicer: Scripted) -> AsyncIterator[str]:
    """The address at which `servicer` answers."""
    name = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name

    def register(server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)

    server = await serve([Service(name, register)], "127.0.0.1:0")
    try:
        yield server.address
    finally:
        await server.stop(0.0)
