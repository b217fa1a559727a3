"""A client that keeps to PROTOCOL.md: it asks, reads, and after a failure asks again where its request id is known."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from specwire.client.requests import generate_request
from specwire.core.messages import FinishReason
from specwire.core.text import hash_of
from specwire.rpc.convert import logprobs_from_wire
from specwire.v1 import generation_pb2 as pb
from specwire.v1 import generation_pb2_grpc
from tests.simulation.asking import Asking
from tests.simulation.calls import Channel
from tests.simulation.hearing import Begun, Ended, Heard
from tests.simulation.network import Network

# Seconds: between attempts, after which a client gives up, and for a call that brings one answer.
PAUSE = 0.4
PATIENCE = 90.0
ANSWER = 10.0
NOT_REACHED = "failed to connect"
RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


class SimClient:
    """One request of one client, of one completion or several."""

    def __init__(self, network: Network, addresses: Sequence[str], asking: Asking) -> None:
        self.hearings = asking.hearings()
        self._network = network
        self._addresses = addresses
        self._asking = asking
        self._ask = asking.ask

    @property
    def _first(self) -> Heard:
        return self.hearings[0]

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._ask.start)
        if await self._asking.ready(self.hearings):
            give_up, number = loop.time() + PATIENCE, self._ask.at
            while not await self._attempt(self._addresses[number % len(self._addresses)]) and loop.time() < give_up:
                number += 1
                await asyncio.sleep(PAUSE)
        for heard in self.hearings:
            heard.done = True

    async def _attempt(self, address: str) -> bool:
        """Whether it is over, one way or the other."""
        for heard in self.hearings:
            heard.attempts += 1
        async with Channel(self._network, address, self._asking.token) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            try:
                await self._read(stub, self._watch(stub) if self._watched else self._generate(stub))
            except grpc.aio.AioRpcError as error:
                return self._failed(error)
        return True

    @property
    def _watched(self) -> bool:
        return len(self.hearings) == 1 and bool(self._first.session_id)

    def _failed(self, error: grpc.aio.AioRpcError) -> bool:
        """Whether it is no use to come back."""
        code, details = error.code(), error.details() or ""
        for heard in self.hearings:
            if heard.end is None:
                heard.error, heard.details = code, details
        known = self._ask.request_id and self._ask.timeout is None
        unreached = details.startswith(NOT_REACHED) and not self._first.session_id
        return not (code in RETRIED and (known or unreached))

    def _generate(self, stub: Any) -> Any:
        request = generate_request(list(self._ask.prompt), **self._asking.options())
        request.n = self._ask.n
        return stub.Generate(request, timeout=self._ask.timeout)

    def _watch(self, stub: Any) -> Any:
        text = [*self._first.prompt, *self._first.tokens]
        request = pb.WatchRequest(
            session_id=self._first.session_id, from_position=len(text), prefix_hash=hash_of(text), take_over=True
        )
        return stub.Watch(request)

    async def _read(self, stub: Any, call: Any) -> None:
        async for event in call:
            await asyncio.sleep(self._ask.reading)
            self._take(self.hearings[event.choice if isinstance(event, pb.GenerateResponse) else 0], event)
            if self._first.has(self._ask.leave_after):
                for heard in self.hearings:
                    heard.left = True
                call.cancel()
                return
            await self._interfere(stub)
        if any(heard.end is None for heard in self.hearings):
            self._asking.facts.report("a stream ended without Finished and without a status")

    async def _interfere(self, stub: Any) -> None:
        """Cancel the session, or delete it, if its time has come."""
        heard, session_id = self._first, self._first.session_id
        if heard.has(self._ask.cancel_after) and not heard.cancelled:
            heard.cancelled = True
            self._asking.facts.end(session_id)
            with suppress(grpc.aio.AioRpcError):
                await stub.Cancel(pb.CancelRequest(session_id=session_id), timeout=ANSWER)
                self._asking.facts.told_cancelled(session_id)
        if heard.has(self._ask.delete_after) and not heard.deleted:
            heard.deleted = True
            self._asking.facts.end(session_id)
            with suppress(grpc.aio.AioRpcError):
                await stub.DeleteSession(pb.DeleteSessionRequest(session_id=session_id), timeout=PATIENCE)
                self._asking.facts.told_deleted(session_id)

    def _take(self, heard: Heard, event: Any) -> None:
        kind = event.WhichOneof("event")
        if heard.end is not None:
            self._asking.facts.report(f"{kind} after the end")
        if kind == "started":
            self._begin(heard, event.started)
        elif kind == "chunk":
            self._extend(heard, event.chunk)
        elif kind == "finished":
            end = event.finished
            heard.end = Ended(FinishReason(end.reason), end.text_length, end.lossy, end.stats.cached_tokens)
            heard.text += end.text

    def _begin(self, heard: Heard, started: pb.Started) -> None:
        if heard.session_id and started.session_id != heard.session_id:
            self._asking.facts.report("the session has another id than before")
        prompt = tuple(started.prompt.tokens) if started.HasField("prompt") else None
        heard.session_id = started.session_id
        heard.started = Begun(started.prompt_tokens, started.prompt_hash, started.lossy, prompt)

    def _extend(self, heard: Heard, chunk: pb.Chunk) -> None:
        position = len(heard.prompt) + len(heard.tokens)
        if chunk.position != position:
            self._asking.facts.report(f"a chunk at {chunk.position} where {position} was due")
        heard.tokens += chunk.tokens
        heard.logprobs += logprobs_from_wire(chunk.logprobs)
        heard.text += chunk.text
