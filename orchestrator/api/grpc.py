"""GenerationService: what clients call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from orchestrator.api import calls, replies
from orchestrator.api.calls import GenerationHandler, cursor_of, merged, single_requests
from orchestrator.api.requests import check_size
from orchestrator.api.scores import PromptScorer
from orchestrator.peers.models import Target
from orchestrator.sessions import Orchestrator
from orchestrator.store import StoredSession
from orchestrator.tenants import check_owner, no_session
from specwire.core.messages import ClientTook
from specwire.rpc import convert
from specwire.rpc.errors import Context
from specwire.telemetry.logs import SHOWN_CHARACTERS
from specwire.telemetry.tracing import Side, parent_in, spanned
from specwire.v1 import common_pb2, generation_pb2_grpc
from specwire.v1 import generation_pb2 as pb


class GenerationApi(generation_pb2_grpc.GenerationServiceServicer):
    """Errors are raised as InvalidParameter, StatusError or StoreError; the interceptor turns them into statuses."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._handler = GenerationHandler(orchestrator)
        self._scorer = PromptScorer(orchestrator)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        tenant, left = self._tenant(context), context.time_remaining()
        parent = parent_in(context.invocation_metadata())
        target = None
        if request.n > 1:  # before the prompt is copied for each of them
            target = await self._handler.target_for(request, tenant)
            check_size(request.text or request.tokens.ids, target)
        singles = single_requests(request)
        (seed,) = await self._handler.seeds.of(request, tenant)
        streams = [
            self._handler.generate(each, tenant, left, seed, traceparent=parent, target=target) for each in singles
        ]
        async with aclosing(merged(streams)) as parts:
            async for choice, part in parts:
                yield replies.generate_response(part, choice)

    def _tenant(self, context: Context) -> str:
        """The calling tenant. Callers that may not call never come here: see specwire.rpc.server."""
        return self._handler.tenant(context.invocation_metadata() or ())

    async def _stored(self, session_id: str) -> StoredSession:
        log = await self._handler.read(session_id)
        if log is None:
            raise no_session(session_id)
        return log

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WatchResponse]:
        check_owner(request.session_id, self._tenant(context))
        shown, parent = request.session_id[:SHOWN_CHARACTERS], parent_in(context.invocation_metadata())
        with spanned("specwire.watch", Side.SERVER, parent, session=shown, take_over=request.take_over) as span:
            driver = await self._orchestrator.join(request.session_id, request.take_over, span.traceparent)
            view = driver.view
            with view.readers.reading():
                timeout = self._orchestrator.options.store_timeout
                cursor = await cursor_of(request, view, self._orchestrator.store, timeout)
                # What the reader has counts as taken: at the end of the credit it would wait for ever.
                view.tell(ClientTook(view.output.prompt_length + cursor.tokens))
                async for part in self._handler.follow(view, cursor):
                    yield replies.watch_response(part)

    async def GetSession(self, request: pb.GetSessionRequest, context: Context) -> pb.GetSessionResponse:
        check_owner(request.session_id, self._tenant(context))
        log = await self._stored(request.session_id)
        return pb.GetSessionResponse(
            prompt_tokens=len(log.record.prompt),
            tokens=[*log.record.prompt, *log.tokens],
            finish_reason=convert.reason_to_wire(log.reason),
            fence=log.fence,
            durability=self._orchestrator.store.durability,
            created_ms=round(log.record.created * 1000),
            ended_ms=round((log.ended or 0.0) * 1000),
            weights_fingerprint=log.record.weights_fingerprint,
            lossy=log.record.sampling.lossy,
        )

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        check_owner(request.session_id, self._tenant(context))
        await calls.cancel(self._orchestrator, request.session_id)
        return pb.CancelResponse()

    async def DeleteSession(self, request: pb.DeleteSessionRequest, context: Context) -> pb.DeleteSessionResponse:
        check_owner(request.session_id, self._tenant(context))
        await calls.delete(self._orchestrator, request.session_id)
        return pb.DeleteSessionResponse()

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        self._orchestrator.pool.require_target()
        targets = [_of_all(target) for target in self._orchestrator.pool.targets()]
        drafters = [described(d.info) for d in self._orchestrator.pool.drafters if d.up and d.info is not None]
        return pb.GetServerInfoResponse(
            target=targets[0],
            drafters=drafters,
            durability=self._orchestrator.store.durability,
            targets=targets,
        )

    async def ScoreText(self, request: pb.ScoreTextRequest, context: Context) -> pb.ScoreTextResponse:
        tenant, target = self._tenant(context), self._orchestrator.pool.target_named(request.model)
        return await self._scorer.continuations(request, target, tenant, context.time_remaining())


def _of_all(target: Target) -> common_pb2.GetModelInfoResponse:
    """The description of a model that several verifiers may serve."""
    info = described(target.info)
    info.context = target.context
    return info


def described(info: common_pb2.GetModelInfoResponse) -> common_pb2.GetModelInfoResponse:
    """The description without the tokenizer, which clients do not need, and the host, which they must not see."""
    copy = common_pb2.GetModelInfoResponse()
    copy.CopyFrom(info)
    copy.ClearField("tokenizer_json")
    copy.ClearField("host_id")
    return copy
