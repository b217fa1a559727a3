"""A client that keeps to PROTOCOL.md: it asks, reads, and after a failure asks again where its request id is known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from specwire.core.limits import FinishReason
from specwire.core.text import hash_of
from specwire.v1 import common_pb2, generation_pb2_grpc
from specwire.v1 import generation_pb2 as pb
from tests.simulation.calls import Channel
from tests.simulation.network import Network
from tests.simulation.scenario import Ask

# Seconds: between attempts, and after which a client gives up.
PAUSE = 0.4
PATIENCE = 90.0
NOT_REACHED = "failed to connect"
RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


@dataclass
class Heard:
    """What a client was told. `error`: the status that its last attempt ended with, if it has no end."""

    ask: Ask
    session_id: str = ""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    end: pb.Finished | None = None
    error: grpc.StatusCode | None = None
    details: str = ""
    left: bool = False
    cancelled: bool = False
    done: bool = False
    attempts: int = 0

    def has(self, tokens: int | None) -> bool:
        """Whether so many tokens are here; None never are."""
        return tokens is not None and len(self.tokens) >= tokens


class SimClient:
    """One request of one client. `report` is told of what breaks the protocol."""

    def __init__(self, network: Network, addresses: list[str], ask: Ask, report: Callable[[str], None]) -> None:
        self.heard = Heard(ask)
        self._network = network
        self._addresses = addresses
        self._report = report

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self.heard.ask.start)
        give_up = loop.time() + PATIENCE
        number = self.heard.ask.at
        while not await self._attempt(self._addresses[number % len(self._addresses)]) and loop.time() < give_up:
            number += 1
            await asyncio.sleep(PAUSE)
        self.heard.done = True

    async def _attempt(self, address: str) -> bool:
        """Whether it is over, one way or the other."""
        heard, ask = self.heard, self.heard.ask
        heard.attempts += 1
        async with Channel(self._network, address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            try:
                await self._read(stub, self._watch(stub) if heard.session_id else self._generate(stub))
            except grpc.aio.AioRpcError as error:
                heard.error, heard.details = error.code(), error.details() or ""
                known = ask.request_id and ask.timeout is None
                return not (heard.error in RETRIED and (known or heard.details.startswith(NOT_REACHED)))
        return True

    def _generate(self, stub: Any) -> Any:
        ask = self.heard.ask
        request = pb.GenerateRequest(
            tokens=pb.TokenIds(ids=ask.prompt),
            sampling=common_pb2.Sampling(temperature=ask.temperature, seed=ask.seed),
            stopping=common_pb2.Stopping(max_tokens=ask.max_tokens),
            stop=ask.stop,
            request_id=ask.request_id,
            drafting=ask.drafting,  # type: ignore[arg-type]  # checked where it is parsed
            provisional=ask.provisional,
        )
        return stub.Generate(request, timeout=ask.timeout)

    def _watch(self, stub: Any) -> Any:
        heard = self.heard
        text = [*heard.ask.prompt, *heard.tokens]
        request = pb.WatchRequest(
            session_id=heard.session_id, from_position=len(text), prefix_hash=hash_of(text), take_over=True
        )
        return stub.Watch(request)

    async def _read(self, stub: Any, call: Any) -> None:
        async for event in call:
            await asyncio.sleep(self.heard.ask.reading)
            self._take(event)
            if self.heard.has(self.heard.ask.leave_after):
                self.heard.left = True
                call.cancel()
                return
            if self.heard.has(self.heard.ask.cancel_after) and not self.heard.cancelled:
                self.heard.cancelled = True
                with suppress(grpc.aio.AioRpcError):
                    await stub.Cancel(pb.CancelRequest(session_id=self.heard.session_id), timeout=1.0)
        if self.heard.end is None:
            self._report("a stream ended without Finished and without a status")

    def _take(self, event: Any) -> None:
        heard = self.heard
        kind = event.WhichOneof("event")
        if heard.end is not None:
            self._report(f"{kind} after the end")
        if kind == "started":
            if heard.session_id and event.started.session_id != heard.session_id:
                self._report("the session has another id than before")
            heard.session_id = event.started.session_id
        elif kind == "chunk":
            position = len(heard.ask.prompt) + len(heard.tokens)
            if event.chunk.position != position:
                self._report(f"a chunk at {event.chunk.position} where {position} was due")
            heard.tokens += event.chunk.tokens
            heard.text += event.chunk.text
        elif kind == "finished":
            heard.end = event.finished
            heard.text += event.finished.text

    @property
    def reason(self) -> FinishReason | None:
        return None if self.heard.end is None else FinishReason(self.heard.end.reason)
