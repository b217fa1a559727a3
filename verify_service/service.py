"""VerifyService on the wire: messages become validated commands, the engine's reports become messages."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import NamedTuple

import grpc
import grpc.aio

from specwire.core.invalid import MOST_SCORED, Code, InvalidParameter
from specwire.core.law.constraint import Matcher
from specwire.core.law.sampling import MOST_LOGPROBS
from specwire.rpc.convert import logprobs_to_wire
from specwire.rpc.errors import StatusError, code_of
from specwire.rpc.model_info import answer
from specwire.rpc.outbox import Outbox
from specwire.rpc.service_thread import ServiceThread, monotonic_us
from specwire.telemetry.tracing import LinkSpans
from specwire.text.constraints import Beginnings, Compiler, Found, NotInstalled
from specwire.text.sandbox import Busy
from specwire.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from verify_service.engine.messages import (
    Begun,
    Command,
    LinkLost,
    Opening,
    Refusal,
    Report,
    Reports,
    Scoring,
    TokenScore,
    TurnAway,
)
from verify_service.engine.sessions import Presence
from verify_service.usage import UsageLog
from verify_service.wire import check_tokens, refusal_to_wire, report_to_wire, tick_from_wire

EngineThread = ServiceThread[Command, Reports, common_pb2.GetModelInfoResponse]
Responses = Outbox[verify_pb2.ConnectVerifyResponse]
ConnectContext = grpc.aio.ServicerContext[verify_pb2.ConnectVerifyRequest, verify_pb2.ConnectVerifyResponse]
InfoContext = grpc.aio.ServicerContext[common_pb2.GetModelInfoRequest, common_pb2.GetModelInfoResponse]
ScoreContext = grpc.aio.ServicerContext[verify_pb2.ScoreRequest, verify_pb2.ScoreResponse]

STOPPING = "the verifier is stopping"
# Seconds for ended links to tell their peers.
FAREWELL_S = 1.0
# Characters of a session's id in traces, as in logs: the whole id is the right to read the session.
SHOWN_CHARACTERS = 8


class VerifyLink(NamedTuple):
    """A Connect stream: what goes out on it, and a future whose exception ends it."""

    outbox: Responses
    broken: asyncio.Future[None]

    def end(self, message: str) -> None:
        """End the stream with UNAVAILABLE: the peer may go on elsewhere."""
        if not self.broken.done():
            self.broken.set_exception(StatusError(grpc.StatusCode.UNAVAILABLE, message))


def turned_away(message: verify_pb2.ConnectVerifyRequest) -> list[Refusal]:
    """Remove the opens, and close their handles: after a refusal nothing is held under a handle."""
    handles = [opening.handle for opening in message.opens]
    message.ClearField("opens")
    message.closes.extend(common_pb2.Close(handle=handle) for handle in handles)
    return [Refusal(handle, Code.UNAVAILABLE, STOPPING) for handle in handles]


def matcher_or_refusal(handle: int, found: Found) -> Matcher | Refusal:
    """The command that tells the engine what became of a session's constraint."""
    match found:
        case InvalidParameter():
            return Refusal(handle, Code.INVALID_ARGUMENT, str(found))
        case NotInstalled():
            return Refusal(handle, Code.FAILED_PRECONDITION, str(found))
        case Busy():
            return Refusal(handle, Code.RESOURCE_EXHAUSTED, str(found))
        case _:
            return found


def trace(spans: LinkSpans, link: int, report: Report) -> None:
    """Write a step's reports onto the spans of its sessions."""
    for admitted in report.admitted:
        spans.event(link, admitted.handle, "seated", position=admitted.position, cached=admitted.cached)
    for decided in report.decided:
        if decided.verdict.finish is not None:
            spans.event(link, decided.handle, "decided", end=decided.verdict.end, reason=decided.verdict.finish.name)
    for refusal in report.refused:
        spans.end(link, refusal.handle, refusal.message)


class VerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """Serves the engine whose model is loaded and described by `info`. Each Connect stream is a link.

    `refused`: sessions, by status.

    Args:
        tenant: whose link a call is; None where there are no tenants.
        usage: where it is told what sessions used, if anywhere.
    """

    def __init__(
        self,
        thread: EngineThread,
        info: common_pb2.GetModelInfoResponse,
        tenant: Callable[[ConnectContext], str] | None = None,
        usage: UsageLog | None = None,
    ) -> None:
        self._tenant = tenant
        self._usage = usage
        self._thread = thread
        self._info = info
        self._numbers = itertools.count()
        self._links: dict[int, VerifyLink] = {}
        self._presence = Presence()
        self._empty = asyncio.Event()
        self._draining = False
        self.refused: Counter[str] = Counter()
        compiler = Compiler(info.tokenizer_json, info.vocabulary, info.eos_ids)
        self._beginnings = Beginnings(compiler)
        self._spans = LinkSpans("specwire.verify")
        thread.on_reports = self._deliver

    def _deliver(self, reports: Reports) -> None:
        """About once a step, in the event loop."""
        for link, report in reports.items():
            self._presence.went(link, (refusal.handle for refusal in report.refused))
            self.refused.update(refusal.code.name.lower() for refusal in report.refused)
            trace(self._spans, link, report)
            if self._usage is not None:
                self._usage.reported(link, report)
            if link in self._links:
                self._links[link].outbox.push(report_to_wire(report))

    @property
    def links(self) -> int:
        return len(self._links)

    async def drain(self, grace: float) -> None:
        """Take no new links or sessions; give the present sessions `grace` seconds to end, then end the links."""
        self._draining = True
        for link in self._links.values():
            link.outbox.push(verify_pb2.ConnectVerifyResponse(draining=True))
        self._thread.send(TurnAway(STOPPING))
        await self._presence.none_left(grace)
        for link in self._links.values():
            link.end(STOPPING)
        await self._wait_until_empty(FAREWELL_S)
        await self._beginnings.stop()

    async def _wait_until_empty(self, seconds: float) -> None:
        self._empty.clear()
        with suppress(TimeoutError):
            if self._links:
                async with asyncio.timeout(seconds):
                    await self._empty.wait()

    async def GetModelInfo(
        self, request: common_pb2.GetModelInfoRequest, _: InfoContext
    ) -> common_pb2.GetModelInfoResponse:
        return answer(self._info, request)

    async def Score(self, request: verify_pb2.ScoreRequest, _: ScoreContext) -> verify_pb2.ScoreResponse:
        check_tokens(request.tokens, self._info.vocabulary, 2, self._info.context)
        if not 1 <= request.from_position < len(request.tokens):
            raise InvalidParameter(
                "from_position", f"must be from 1 to {len(request.tokens) - 1}, not {request.from_position}"
            )
        if request.top > MOST_LOGPROBS:
            raise InvalidParameter("top", f"must be from 0 to {MOST_LOGPROBS}, not {request.top}")
        if len(request.others) >= MOST_SCORED:
            raise InvalidParameter("others", f"at most {MOST_SCORED - 1} are allowed, not {len(request.others)}")
        for other in request.others:
            check_tokens(other.tokens, self._info.vocabulary, 1, self._info.context - request.from_position)
        scores = await self._score(request)
        told = scores if request.HasField("top") else []
        return verify_pb2.ScoreResponse(
            log_probabilities=[each.logprobs.logprob for each in scores],
            scored=logprobs_to_wire(each.logprobs for each in told),
            ranks=[each.rank for each in told],
        )

    async def _score(self, request: verify_pb2.ScoreRequest) -> list[TokenScore]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[list[TokenScore] | Refusal] = loop.create_future()

        def settle(result: list[TokenScore] | Refusal) -> None:
            if not done.done():
                done.set_result(result)

        def reply(result: list[TokenScore] | Refusal) -> None:
            loop.call_soon_threadsafe(settle, result)

        others = tuple(tuple(other.tokens) for other in request.others)
        scoring = Scoring(tuple(request.tokens), request.from_position, reply, request.top, others=others)
        self._thread.send(scoring)
        try:
            result = await done
        finally:
            scoring.cancelled = True
        if isinstance(result, Refusal):
            raise StatusError(code_of(result.code), result.message)
        return result

    async def Connect(self, requests: AsyncIterator[verify_pb2.ConnectVerifyRequest], context: ConnectContext) -> None:
        if self._draining:
            raise StatusError(grpc.StatusCode.UNAVAILABLE, STOPPING)
        tenant = "" if self._tenant is None else self._tenant(context)
        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        link = VerifyLink(Responses(context.write, lambda error: link.end(str(error))), broken)
        number = next(self._numbers)
        self._links[number] = link
        reading = asyncio.ensure_future(self._read(requests, number, link.outbox, tenant))
        try:
            done, _ = await asyncio.wait([reading, broken], return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                future.result()
        finally:
            reading.cancel()
            broken.cancel()
            self._thread.send(LinkLost(number))
            self._forget(number)
            await link.outbox.close()

    def _forget(self, number: int) -> None:
        self._beginnings.lost(number)
        del self._links[number]
        self._presence.lost(number)
        self._spans.lose(number)
        if self._usage is not None:
            self._usage.link_lost(number)
        if not self._links:
            self._empty.set()

    def _trace(self, link: int, message: verify_pb2.ConnectVerifyRequest) -> None:
        """Closes come first, so that a handle may be used again."""
        for close in message.closes:
            self._spans.end(link, close.handle)
        for opening in message.opens:
            session, tokens = opening.session_id[:SHOWN_CHARACTERS], len(opening.tokens)
            self._spans.begin(link, opening.handle, opening.traceparent, session=session, tokens=tokens)

    def _begin(self, link: int, opening: Opening) -> None:
        """Compile its constraint; the engine has the session already and waits for that."""
        constraint = opening.sampling.constraint
        if constraint is None:
            return

        def tell(found: Found) -> None:
            self._thread.send(
                Begun(link, opening.handle, opening.generation, matcher_or_refusal(opening.handle, found))
            )

        self._beginnings.begin(link, constraint, opening.tokens[opening.prompt_length :], tell)

    async def _read(
        self, requests: AsyncIterator[verify_pb2.ConnectVerifyRequest], link: int, outbox: Responses, tenant: str = ""
    ) -> None:
        async for message in requests:
            late = turned_away(message) if self._draining else []
            tick, refusals = tick_from_wire(link, message, self._info, monotonic_us(), tenant)
            self._presence.came(link, (opening.handle for opening in tick.opens))
            self._presence.went(link, tick.closes)
            self._trace(link, message)
            if self._usage is not None:  # closes come first, so that a handle may be used again
                self._usage.closed(link, tick.closes)
                for opening in tick.opens:
                    self._usage.opened(link, opening)
            refusals += late
            if refusals:
                self.refused.update(refusal.code.name.lower() for refusal in refusals)
                refused = [refusal_to_wire(refusal) for refusal in refusals]
                outbox.push(verify_pb2.ConnectVerifyResponse(refused=refused))
            self._thread.send(tick)
            for opening in tick.opens:
                self._begin(link, opening)
            await self._thread.room()
