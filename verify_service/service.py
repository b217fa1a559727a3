"""VerifyService on the wire: messages become validated commands, the engine's reports become messages."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from specwire.core.sampling import InvalidParameter
from specwire.rpc.errors import StatusError, code_of
from specwire.rpc.model_info import answer
from specwire.rpc.outbox import LinkError, Outbox
from specwire.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from verify_service.clock import monotonic_us
from verify_service.commands import LinkLost, Refusal, Reports, Scoring
from verify_service.wire import check_tokens, refusal_to_wire, report_to_wire, tick_from_wire
from verify_service.worker import Worker

EngineWorker = Worker[common_pb2.GetModelInfoResponse]
Responses = Outbox[verify_pb2.ConnectVerifyResponse]
ConnectContext = grpc.aio.ServicerContext[verify_pb2.ConnectVerifyRequest, verify_pb2.ConnectVerifyResponse]
InfoContext = grpc.aio.ServicerContext[common_pb2.GetModelInfoRequest, common_pb2.GetModelInfoResponse]
ScoreContext = grpc.aio.ServicerContext[verify_pb2.ScoreRequest, verify_pb2.ScoreResponse]

# A peer that sends faster than the engine takes in is read slowly.
MOST_BACKLOG = 1024
BACKLOG_PAUSE_S = 0.005


class VerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """Serves the engine whose model is loaded and described by `info`. Each Connect stream is a link."""

    def __init__(self, worker: EngineWorker, info: common_pb2.GetModelInfoResponse) -> None:
        self._worker = worker
        self._info = info
        self._numbers = itertools.count()
        self._outboxes: dict[int, Responses] = {}
        worker.on_reports = self._deliver

    def _deliver(self, reports: Reports) -> None:
        """Once a step, in the event loop."""
        for link, report in reports.items():
            outbox = self._outboxes.get(link)
            if outbox is not None:
                outbox.push(report_to_wire(report))

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
        return verify_pb2.ScoreResponse(log_probabilities=await self._score(request))

    async def _score(self, request: verify_pb2.ScoreRequest) -> list[float]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[list[float] | Refusal] = loop.create_future()

        def settle(result: list[float] | Refusal) -> None:
            if not done.done():
                done.set_result(result)

        def reply(result: list[float] | Refusal) -> None:
            loop.call_soon_threadsafe(settle, result)

        scoring = Scoring(tuple(request.tokens), request.from_position, reply)
        self._worker.send(scoring)
        try:
            result = await done
        finally:
            scoring.cancelled = True
        if isinstance(result, Refusal):
            raise StatusError(code_of(result.code), result.message)
        return result

    async def Connect(self, requests: AsyncIterator[verify_pb2.ConnectVerifyRequest], context: ConnectContext) -> None:
        loop = asyncio.get_running_loop()
        broken: asyncio.Future[None] = loop.create_future()

        def on_failure(error: LinkError) -> None:
            broken.set_exception(StatusError(grpc.StatusCode.UNAVAILABLE, str(error)))

        link, outbox = next(self._numbers), Responses(context.write, on_failure)
        self._outboxes[link] = outbox
        reading = loop.create_task(self._read(requests, link, outbox), name=f"link {link}")
        try:
            done, _ = await asyncio.wait([reading, broken], return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                future.result()
        finally:
            reading.cancel()
            broken.cancel()
            self._worker.send(LinkLost(link))
            del self._outboxes[link]
            await outbox.close()

    async def _read(
        self, requests: AsyncIterator[verify_pb2.ConnectVerifyRequest], link: int, outbox: Responses
    ) -> None:
        async for message in requests:
            tick, refusals = tick_from_wire(link, message, self._info, monotonic_us())
            if refusals:
                refused = [refusal_to_wire(refusal) for refusal in refusals]
                outbox.push(verify_pb2.ConnectVerifyResponse(refused=refused))
            self._worker.send(tick)
            if self._worker.backlog > MOST_BACKLOG:
                await asyncio.sleep(BACKLOG_PAUSE_S)
