"""One HTTP endpoint: who calls, the body, the answer, what went wrong, and what all endpoints share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass

import grpc
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.admission import Aside
from orchestrator.api.calls import GenerationHandler
from orchestrator.chat.answer import ChatPrompt
from orchestrator.chat.fields import Fields
from orchestrator.chat.models import ChatModel, ChatModels
from orchestrator.chat.talk import Talk
from orchestrator.http.bodies import RETRY_S, Bodies, check_length, most_body_bytes, parse, read_body
from orchestrator.http.errors import INVALID, SERVER, Failure, failure_of
from orchestrator.peers.models import Target
from orchestrator.sessions import Orchestrator
from orchestrator.tenants import ANONYMOUS
from specwire.rpc.errors import StatusError
from specwire.rpc.model_info import Identity
from specwire.text.sandbox import Busy
from specwire.text.tokenizer import TokenBytes
from specwire.text.tool_calls.formats import ChatFamily
from specwire.v1 import generation_pb2 as pb

# ----------------------------------------------------------------------------------------------------------------------
# What the HTTP endpoints share: the orchestrator behind them, who calls, the served model and its template.

# Digits of the identity that are shown: enough to tell versions apart.
FINGERPRINT_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request, read whole. headers: names in lower case. path: what the route's placeholders stand for."""

    tenant: str
    body: bytes
    headers: dict[str, str]
    query: list[tuple[str, str]]
    path: dict[str, str]


@dataclass(frozen=True, slots=True)
class Served:
    """A model as HTTP's callers see it."""

    target: Target
    names: TokenBytes
    chat: ChatModel

    @property
    def family(self) -> ChatFamily:
        return self.chat.family

    @property
    def name(self) -> str:
        return self.target.info.model

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: with another one the same seed may give another text."""
        return f"fp_{self.target.identity.digest[:FINGERPRINT_DIGITS]}"


class HttpService:
    """chats: its owner stops it."""

    def __init__(self, orchestrator: Orchestrator, chats: ChatModels) -> None:
        self.orchestrator = orchestrator
        self.handler = GenerationHandler(orchestrator)
        self.started = int(time.time())
        self._chats = chats
        self._served: dict[Identity, Served] = {}
        self._left: set[asyncio.Task[None]] = set()

    def served(self, model: str | None = None) -> Served:
        """The target for new sessions of the model with this name; of the only model where no name is given.

        Raises:
            StatusError: UNAVAILABLE, no verifier has said yet what it serves.
            InvalidParameter: there are several models, and none is named.
            Failure: 404, another model was asked for.
        """
        try:
            return self._of(self.orchestrator.pool.target_named(model or ""))
        except StatusError as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise
            raise Failure(404, error.message, INVALID, "model", "model_not_found") from None

    async def served_for(self, request: pb.GenerateRequest, tenant: str) -> Served:
        """Like `served`, for the model that the request names, else its parent's."""
        if request.model or not request.parent:
            return self.served(request.model)
        return self._of(await self.handler.target_for(request, tenant))

    def all_served(self) -> list[Served]:
        """Every model, by rising name; at least one. Raises StatusError (UNAVAILABLE)."""
        pool = self.orchestrator.pool
        pool.require_target()
        return [self._of(target) for target in pool.targets()]

    @property
    def most_body_bytes(self) -> int:
        """Most bytes of a body: as configured, else what the largest served context may need."""
        contexts = [target.context for target in self.orchestrator.pool.targets()]
        return self.orchestrator.options.http_access.body or most_body_bytes(max(contexts, default=0))

    def _of(self, target: Target) -> Served:
        known = self._served.get(target.identity)
        if known is None or known.target != target:
            versions = self.orchestrator.pool.models
            self._served = {each: one for each, one in self._served.items() if versions.version(each) is not None}
            names = TokenBytes(target.tokenizer) if known is None else known.names
            self._served[target.identity] = Served(target, names, self._chats.of(target))
        return self._served[target.identity]

    async def fields(self, call: Call) -> Fields:
        """Fields of the JSON object in the body. Raises InvalidParameter; StatusError: no tokens are left."""
        self.orchestrator.admission.charge(call.tenant, len(call.body))
        return Fields(await parse(self.orchestrator.admission, call.body, call.tenant))

    async def chat(self, served: Served, talk: Talk, aside: Aside) -> ChatPrompt:
        """As `ChatModel.asked`. Raises Failure (503) where too many wait."""
        try:
            return await served.chat.asked(talk, aside)
        except Busy as error:
            raise Failure(503, str(error), SERVER, None, "unavailable", RETRY_S) from None

    def soon(self, work: Coroutine[None, None, None]) -> None:
        """Do it whatever becomes of the caller; `stop` waits for it."""
        task = asyncio.create_task(work)
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    async def stop(self) -> None:
        """Idempotent."""
        await asyncio.gather(*self._left, return_exceptions=True)


# ----------------------------------------------------------------------------------------------------------------------
# One HTTP endpoint: authentication, then the body, the answer and errors; the work is cancelled when the caller leaves.

Responder = Callable[[Call], Awaitable[ASGIApp]]
# Called with the route and the status of every answer.
Observer = Callable[[str, int], None]


class Endpoint:
    """An ASGI application. answer: what it does. guarded: callers need a key, where keys are asked for."""

    def __init__(
        self, service: HttpService, answer: Responder, route: str, guarded: bool, observe: Observer, bodies: Bodies
    ) -> None:
        self._service = service
        self._answer = answer
        self._route = route
        self._guarded = guarded
        self._observe = observe
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = self._observed(send)
        with ExitStack() as held:
            try:
                work = self._respond(await self._call(scope, receive, held), held, scope, receive, told)
            except ClientDisconnect:
                return
            except Exception as error:
                await failure_of(error).response()(scope, receive, told)
                return
            await unless_disconnected(receive, work)

    async def _call(self, scope: Scope, receive: Receive, held: ExitStack) -> Call:
        request = Request(scope, receive)
        headers = {name.lower(): value for name, value in request.headers.items()}
        tenant = self._service.handler.tenant(headers.items()) if self._guarded else ANONYMOUS
        most = self._service.most_body_bytes
        check_length(headers.get("content-length", ""), most)
        space = held.enter_context(self._bodies.of(tenant))
        body = await read_body(request.stream(), space, most)
        return Call(tenant, body, headers, request.query_params.multi_items(), dict(request.path_params))

    async def _respond(self, call: Call, held: ExitStack, scope: Scope, receive: Receive, send: Send) -> None:
        """held: the body's memory, until an answer begins."""
        try:
            response = await self._answer(call)
        except Exception as error:
            response = failure_of(error).response()
        del call
        held.close()
        await response(scope, receive, send)

    def _observed(self, send: Send) -> Send:
        async def observing(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._observe(self._route, message["status"])
            await send(message)

        return observing


async def unless_disconnected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Do `work`; cancel it at once if the caller leaves."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
