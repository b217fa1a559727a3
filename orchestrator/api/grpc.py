"""GenerationService: what clients call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from orchestrator.api import calls
from orchestrator.api.calls import GenerationHandler, Part, cursor_of, merged, single_requests
from orchestrator.api.requests import check_size
from orchestrator.api.scores import PromptScorer
from orchestrator.chat.answer import AnswerForm, ChatPrompt
from orchestrator.chat.models import ChatModels
from orchestrator.chat.wire import talk_of
from orchestrator.peers.models import Target
from orchestrator.sessions import Orchestrator
from orchestrator.store import StoredSession
from orchestrator.tenants import check_owner, no_session
from specwire.core.invalid import InvalidParameter
from specwire.core.messages import ClientTook
from specwire.rpc import convert
from specwire.rpc.errors import RETRY_AFTER, Context, StatusError
from specwire.telemetry.logs import SHOWN_CHARACTERS
from specwire.telemetry.tracing import Side, parent_in, spanned
from specwire.text.sandbox import Busy
from specwire.v1 import common_pb2, generation_pb2_grpc
from specwire.v1 import generation_pb2 as pb


class GenerationApi(generation_pb2_grpc.GenerationServiceServicer):
    """Errors are raised as InvalidParameter, StatusError or StoreError; the interceptor turns them into statuses."""

    def __init__(self, orchestrator: Orchestrator, chats: ChatModels) -> None:
        self._orchestrator = orchestrator
        self._chats = chats
        self._handler = GenerationHandler(orchestrator)
        self._scorer = PromptScorer(orchestrator)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        tenant, left = self._tenant(context), context.time_remaining()
        parent = parent_in(context.invocation_metadata())
        target = chat = None
        if request.n > 1 or request.HasField("chat"):  # before the prompt is copied for each of them
            target = await self._handler.target_for(request, tenant)
            chat = await self._chat(request.chat, target) if request.HasField("chat") else None
            check_size(
                chat.text if chat else request.text or request.tokens.ids, target, "messages" if chat else "prompt"
            )
        singles = single_requests(request)
        (seed,) = await self._handler.seeds.of(request, tenant)
        more: dict[str, Any] = {"traceparent": parent, "target": target, "chat": chat}
        streams = [self._handler.generate(each, tenant, left, seed, **more) for each in singles]
        with _naming_tools(chat):
            async with aclosing(merged(streams)) as parts:
                async for choice, part in parts:
                    yield generate_response(part, choice)

    async def _chat(self, chat: pb.Chat, target: Target) -> ChatPrompt:
        """What a session is asked for. Raises InvalidParameter; StatusError: too many wait for their template."""
        talk, model = talk_of(chat), self._chats.of(target)
        try:
            prompt = await model.prompt(talk)
        except Busy as busy:
            raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(busy), RETRY_AFTER) from None
        constraint = talk.tools.constraint(model.family, talk.opens_thought(prompt))
        return ChatPrompt(prompt, constraint, AnswerForm.of(model.family, talk, prompt))

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
                    yield watch_response(part)

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


@contextmanager
def _naming_tools(chat: ChatPrompt | None) -> Iterator[None]:
    """A refusal of the form that tools demand is one of the tools."""
    try:
        yield
    except (InvalidParameter, StatusError) as error:
        demanded = f"{chat.constraint.kind}: " if chat is not None and chat.constraint is not None else ""
        said = error.message if isinstance(error, StatusError) else str(error)
        if not demanded or not said.startswith(demanded):
            raise
        message = said.removeprefix(demanded)
        if isinstance(error, StatusError):
            raise StatusError(error.code, f"tools: {message}", error.retry_after) from None
        raise InvalidParameter("tools", message) from None


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


def generate_response(part: Part, choice: int = 0) -> pb.GenerateResponse:
    match part:
        case pb.Started():
            return pb.GenerateResponse(started=part, choice=choice)
        case pb.Chunk():
            return pb.GenerateResponse(chunk=part, choice=choice)
        case pb.Provisional():
            return pb.GenerateResponse(provisional=part, choice=choice)
        case pb.Finished():
            return pb.GenerateResponse(finished=part, choice=choice)


def watch_response(part: Part) -> pb.WatchResponse:
    """Refuse provisional events for `Watch`: asking for them is a programming error."""
    match part:
        case pb.Started():
            return pb.WatchResponse(started=part)
        case pb.Chunk():
            return pb.WatchResponse(chunk=part)
        case pb.Finished():
            return pb.WatchResponse(finished=part)
        case pb.Provisional():
            raise TypeError("Watch has no provisional text")
