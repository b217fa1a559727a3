"""DraftService on the wire. Each Connect stream is a link with handles of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from draft_service.reception import DraftReception, OrchestratorLink
from specwire.rpc.errors import StatusError
from specwire.rpc.model_service import answer
from specwire.rpc.outbox import Outbox
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc

Context = grpc.aio.ServicerContext[draft_pb2.ConnectDraftRequest, draft_pb2.ConnectDraftResponse]


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Serves a drafter whose model is loaded."""

    def __init__(self, reception: DraftReception) -> None:
        self._reception = reception
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """End every link: their sessions only get slower, and their orchestrators may find another drafter."""
        self._leaving.set()

    async def stop(self) -> None:
        """Stop; to be called after the links have ended."""
        await self._reception.stop()

    async def GetModelInfo(
        self, request: common_pb2.GetModelInfoRequest, _: Context
    ) -> common_pb2.GetModelInfoResponse:
        return answer(self._reception.info, request)

    async def Connect(self, requests: AsyncIterator[draft_pb2.ConnectDraftRequest], context: Context) -> None:
        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        outbox = Outbox(context.write, lambda _: broken.set_result(None))
        link = OrchestratorLink(outbox.push)
        reading = asyncio.ensure_future(self._read(requests, link))
        leaving = asyncio.ensure_future(self._leave_called())
        try:
            await asyncio.wait({reading, broken, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if outbox.failed is not None:
                raise StatusError(grpc.StatusCode.UNAVAILABLE, str(outbox.failed))
            if leaving.done():
                raise StatusError(grpc.StatusCode.UNAVAILABLE, "the drafter is stopping")
            reading.result()
        finally:
            reading.cancel()
            leaving.cancel()
            self._reception.lose(link)
            await outbox.close()

    async def _leave_called(self) -> None:
        await self._leaving.wait()

    async def _read(self, requests: AsyncIterator[draft_pb2.ConnectDraftRequest], link: OrchestratorLink) -> None:
        async for message in requests:
            self._reception.take(message, link)
            await self._reception.room()
