"""The clients of a simulation: their requests, turn by turn, and the answers.

One keeps to PROTOCOL.md by itself: it asks, reads, and after a failure asks again where its request id is known. The
other is the project's own library: how it comes back after a failure is its affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from specwire.client import AsyncClient, Chunk, Event, Finished, SpecwireError, Started
from specwire.client.requests import RequestOptions, generate_request
from specwire.core.messages import FinishReason, TokenLogprobs
from specwire.core.text import hash_of
from specwire.rpc.convert import logprobs_from_wire
from specwire.v1 import generation_pb2 as pb
from specwire.v1 import generation_pb2_grpc
from tests.simulation.calls import Channel
from tests.simulation.expected import Plain, Wish
from tests.simulation.facts import Facts
from tests.simulation.network import Network
from tests.simulation.requests import SimRequest

# Seconds between two looks whether the turn before is over.
LOOK = 0.1
# Of a prediction every so many-th token is wrong.
WRONG = 7
# Seconds: between attempts, after which a client gives up, and for a call that brings one answer.
PAUSE = 0.4
PATIENCE = 90.0
ANSWER = 10.0
NOT_REACHED = "failed to connect"
RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


@dataclass(frozen=True, slots=True)
class AnswerStart:
    """prompt: where it was echoed."""

    prompt_tokens: int
    prompt_hash: int | None
    lossy: bool
    prompt: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    reason: FinishReason
    text_length: int
    lossy: bool
    cached_tokens: int


@dataclass
class SimAnswer:
    """Of one completion.

    tenant: as orchestrators call it. prompt: all that the output goes on behind, a parent's text included.
    error: the status that its last attempt ended with, if it has no end. unasked: there was no turn to go on behind.
    """

    request: SimRequest
    tenant: str = ""
    choice: int = 0
    prompt: tuple[int, ...] = ()
    session_id: str = ""
    started: AnswerStart | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    end: AnswerEnd | None = None
    error: grpc.StatusCode | None = None
    details: str = ""
    left: bool = False
    cancelled: bool = False
    deleted: bool = False
    unasked: bool = False
    done: bool = False
    attempts: int = 0

    def has(self, tokens: int | None) -> bool:
        """Whether so many tokens are here; None never are."""
        return tokens is not None and bool(self.session_id) and len(self.tokens) >= tokens


def tenant_name(number: int) -> str:
    return f"tenant-{number}"


def token_of(number: int) -> str:
    """What a tenant's clients show."""
    return f"token-of-tenant-{number}"


@dataclass
class SimTurn:
    """before: the turn that it follows. tenants: how many there are; a single one shows nothing."""

    request: SimRequest
    facts: Facts
    tenants: int
    before: SimAnswer | None = None

    @property
    def token(self) -> str:
        return token_of(self.request.tenant) if self.tenants > 1 else ""

    def answers(self) -> list[SimAnswer]:
        tenant = tenant_name(self.request.tenant) if self.tenants > 1 else ""
        return [SimAnswer(self.request, tenant, choice, self.request.prompt) for choice in range(self.request.n)]

    async def ready(self, answers: Sequence[SimAnswer]) -> bool:
        """Wait for the end of the turn before. Whether there is one to go on behind."""
        before = self.before
        if before is None:
            return True
        while not before.done:  # noqa: ASYNC110 # by the clock of the simulation
            await asyncio.sleep(LOOK)
        for answer in answers:
            answer.prompt = (*before.prompt, *before.tokens, *self.request.prompt)
            answer.unasked = before.end is None
        return before.end is not None

    def options(self) -> RequestOptions:
        parent = "" if self.before is None else self.before.session_id
        return self.request.options(parent, self._prediction() if self.request.predicted else ())

    def _prediction(self) -> list[int]:
        """What plain decoding says, with mistakes; where proposals have a say, the prompt again."""
        before = () if self.before is None else (*self.before.prompt, *self.before.tokens)
        prompt = (*before, *self.request.prompt)
        known = self.facts.of(Wish(prompt, self.request.sampling(), self.request.stopping, self.request.stop))
        right = known.raw[len(prompt) :] if isinstance(known, Plain) else prompt
        return [1 if index % WRONG == 0 else token for index, token in enumerate(right[: self.request.predicted], 1)]

    async def interfere(
        self,
        answer: SimAnswer,
        failure: type[Exception],
        cancel: Callable[[str], Awaitable[object]],
        delete: Callable[[str], Awaitable[object]],
    ) -> None:
        """Cancel the session, or delete it, if its time has come."""
        if answer.has(self.request.cancel_after) and not answer.cancelled:
            answer.cancelled = True
            self.facts.end(answer.session_id)
            with suppress(failure):
                await cancel(answer.session_id)
                self.facts.told_cancelled(answer.session_id)
        if answer.has(self.request.delete_after) and not answer.deleted:
            answer.deleted = True
            self.facts.end(answer.session_id)
            with suppress(failure):
                await delete(answer.session_id)
                self.facts.told_deleted(answer.session_id)


class SimClient:
    """One request of one client, of one completion or several."""

    def __init__(self, network: Network, addresses: Sequence[str], turn: SimTurn) -> None:
        self.answers = turn.answers()
        self._network = network
        self._addresses = addresses
        self._turn = turn
        self._request = turn.request

    @property
    def _first(self) -> SimAnswer:
        return self.answers[0]

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._request.start)
        if await self._turn.ready(self.answers):
            give_up, number = loop.time() + PATIENCE, self._request.at
            while not await self._attempt(self._addresses[number % len(self._addresses)]) and loop.time() < give_up:
                number += 1
                await asyncio.sleep(PAUSE)
        for answer in self.answers:
            answer.done = True

    async def _attempt(self, address: str) -> bool:
        """Whether it is over, one way or the other."""
        for answer in self.answers:
            answer.attempts += 1
        async with Channel(self._network, address, self._turn.token) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            try:
                await self._read(stub, self._watch(stub) if self._watched else self._generate(stub))
            except grpc.aio.AioRpcError as error:
                return self._failed(error)
        return True

    @property
    def _watched(self) -> bool:
        return len(self.answers) == 1 and bool(self._first.session_id)

    def _failed(self, error: grpc.aio.AioRpcError) -> bool:
        """Whether it is no use to come back."""
        code, details = error.code(), error.details() or ""
        for answer in self.answers:
            if answer.end is None:
                answer.error, answer.details = code, details
        known = self._request.request_id and self._request.timeout is None
        unreached = details.startswith(NOT_REACHED) and not self._first.session_id
        return not (code in RETRIED and (known or unreached))

    def _generate(self, stub: Any) -> Any:
        request = generate_request(list(self._request.prompt), **self._turn.options())
        request.n = self._request.n
        return stub.Generate(request, timeout=self._request.timeout)

    def _watch(self, stub: Any) -> Any:
        text = [*self._first.prompt, *self._first.tokens]
        request = pb.WatchRequest(
            session_id=self._first.session_id, from_position=len(text), prefix_hash=hash_of(text), take_over=True
        )
        return stub.Watch(request)

    async def _read(self, stub: Any, call: Any) -> None:
        async for event in call:
            await asyncio.sleep(self._request.reading)
            self._take(self.answers[event.choice if isinstance(event, pb.GenerateResponse) else 0], event)
            if self._first.has(self._request.leave_after):
                for answer in self.answers:
                    answer.left = True
                call.cancel()
                return
            await self._turn.interfere(
                self._first,
                grpc.aio.AioRpcError,
                lambda of: stub.Cancel(pb.CancelRequest(session_id=of), timeout=ANSWER),
                lambda of: stub.DeleteSession(pb.DeleteSessionRequest(session_id=of), timeout=PATIENCE),
            )
        if any(answer.end is None for answer in self.answers):
            self._turn.facts.report("a stream ended without Finished and without a status")

    def _take(self, answer: SimAnswer, event: Any) -> None:
        kind = event.WhichOneof("event")
        if answer.end is not None:
            self._turn.facts.report(f"{kind} after the end")
        if kind == "started":
            self._begin(answer, event.started)
        elif kind == "chunk":
            self._extend(answer, event.chunk)
        elif kind == "finished":
            end = event.finished
            answer.end = AnswerEnd(FinishReason(end.reason), end.text_length, end.lossy, end.stats.cached_tokens)
            answer.text += end.text

    def _begin(self, answer: SimAnswer, started: pb.Started) -> None:
        if answer.session_id and started.session_id != answer.session_id:
            self._turn.facts.report("the session has another id than before")
        prompt = tuple(started.prompt.tokens) if started.HasField("prompt") else None
        answer.session_id = started.session_id
        answer.started = AnswerStart(started.prompt_tokens, started.prompt_hash, started.lossy, prompt)

    def _extend(self, answer: SimAnswer, chunk: pb.Chunk) -> None:
        position = len(answer.prompt) + len(answer.tokens)
        if chunk.position != position:
            self._turn.facts.report(f"a chunk at {chunk.position} where {position} was due")
        answer.tokens += chunk.tokens
        answer.logprobs += logprobs_from_wire(chunk.logprobs)
        answer.text += chunk.text


class LibraryClient:
    """One request, as SimClient makes it, through specwire.client."""

    def __init__(self, addresses: Sequence[str], turn: SimTurn) -> None:
        self.answers = turn.answers()
        self._turn = turn
        self._request = turn.request
        self._addresses = [*addresses[self._request.at :], *addresses[: self._request.at]]

    @property
    def _answer(self) -> SimAnswer:
        return self.answers[0]

    async def run(self) -> None:
        await asyncio.sleep(self._request.start)
        if await self._turn.ready(self.answers):
            async with AsyncClient(self._addresses, token=self._turn.token, patience=PATIENCE) as client:
                try:
                    await self._read(client)
                except SpecwireError as error:
                    self._answer.error, self._answer.details = error.code, error.message
        self._answer.done = True

    async def _read(self, client: AsyncClient) -> None:
        answer, request = self._answer, self._request
        answer.attempts += 1
        stream = client.generate(list(request.prompt), timeout=request.timeout or PATIENCE, **self._turn.options())
        async with aclosing(stream) as events:
            async for event in events:
                await asyncio.sleep(request.reading)
                self._take(event)
                if answer.has(request.leave_after):
                    answer.left = True
                    if not request.request_id:
                        self._turn.facts.end(answer.session_id)  # the library cancels what only it can come back to
                    return
                await self._turn.interfere(
                    answer,
                    SpecwireError,
                    lambda of: client.cancel(of, timeout=PATIENCE),
                    lambda of: client.delete_session(of, timeout=PATIENCE),
                )

    def _take(self, event: Event) -> None:
        answer = self._answer
        match event:
            case Started():
                answer.session_id = event.session_id
                prompt = None if event.prompt is None else event.prompt.tokens
                answer.started = AnswerStart(event.prompt_tokens, event.prompt_hash, event.lossy, prompt)
            case Chunk():
                position = len(answer.prompt) + len(answer.tokens)
                if event.position != position:
                    message = f"the library gave a chunk at {event.position} where {position} was due"
                    self._turn.facts.report(message)
                answer.tokens += event.tokens
                answer.logprobs += event.logprobs
                answer.text += event.text
            case Finished():
                answer.text += event.text
                answer.end = AnswerEnd(event.reason, event.text_length, event.lossy, event.stats.cached_tokens)
