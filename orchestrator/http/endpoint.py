"""One HTTP endpoint: who calls, the body, the answer, what went wrong, and what all endpoints share."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import grpc
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.admission import LONG_BYTES, MOST_DEPTH, Admission, Aside
from orchestrator.api.calls import GenerationHandler
from orchestrator.chat.fields import Fields, JsonBounds, no_number
from orchestrator.chat.models import ChatModel, ChatModels
from orchestrator.http.errors import INVALID, RETRY_S, Failure, failure_of
from orchestrator.sessions import Orchestrator
from orchestrator.tenants import ANONYMOUS
from specwire.core.invalid import MOST_PARTS, InvalidParameter
from specwire.rpc.errors import StatusError
from specwire.v1 import generation_pb2 as pb

# ----------------------------------------------------------------------------------------------------------------------
# Requests' bodies: read within bounds on time, size and each tenant's memory.
#
# They are parsed as JSON into a small multiple of their size, without holding up the event loop.

# For all fields but the prompt, and for each token of a context: a token is some four characters or a number, and JSON
# may spell a character in six bytes.
BASE_BODY_BYTES, TOKEN_BYTES = 1024 * 1024, 64
# As much as a gRPC message.
MOST_BODY_BYTES = 16 * 1024 * 1024
BODY_LIMIT_S = 30.0
# Most bytes of one tenant's bodies that are being read or whose answers have not begun. Parsed they take up to 16 times
# as much.
MOST_TENANT_BYTES = 64 * 1024 * 1024
# JSON escapes that may be half a character (surrogates).
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def most_body_bytes(context: int) -> int:
    """Bytes that a request to a model with such a context may need."""
    return min(MOST_BODY_BYTES, BASE_BODY_BYTES + TOKEN_BYTES * context)


def check_length(size: str, most: int) -> None:
    """Refuse a Content-Length beyond `most`, before anything is read. Raises Failure."""
    if size.isdecimal() and int(size) > most:
        raise _too_large(most)


async def read_body(parts: AsyncIterator[bytes], space: BodyReservation, most: int) -> bytes:
    """The whole body, within BODY_LIMIT_S and `most` bytes.

    Raises:
        Failure: 413, it is too long; 408, it did not come; 429, there is no space for it now.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            async for part in parts:
                if len(body) + len(part) > most:
                    raise _too_large(most)
                space.take(len(part))
                body += part
    except TimeoutError:
        message = f"body: did not come within {BODY_LIMIT_S:g} s"
        raise Failure(408, message, INVALID, None, "timeout", close=True) from None
    return bytes(body)


def _too_large(most: int) -> Failure:
    message = (
        f"body: more than {most} bytes, which is what this model's context may need; --http-body sets another limit"
    )
    return Failure(413, message, INVALID, None, "too_large", close=True)


class BodyReservation:
    """The memory that one body takes of its tenant's share. held_by: bytes of bodies in memory, by tenant."""

    def __init__(self, held_by: Counter[str], tenant: str) -> None:
        self._held_by = held_by
        self._tenant = tenant
        self.held = 0

    def take(self, size: int) -> None:
        """Raises Failure."""
        if self._held_by[self._tenant] + size > MOST_TENANT_BYTES:
            message = f"body: this tenant's requests have {MOST_TENANT_BYTES} bytes of bodies under way already"
            raise Failure(429, message, "rate_limit_error", None, "rate_limit_exceeded", RETRY_S, close=True)
        self._held_by[self._tenant] += size
        self.held += size

    def release(self) -> None:
        self._held_by[self._tenant] -= self.held
        if not self._held_by[self._tenant]:
            del self._held_by[self._tenant]


async def parse(admission: Admission, body: bytes, tenant: str) -> dict[str, Any]:
    """The JSON object in a request's body; NaN and infinities are no JSON. InvalidParameter of `body`."""
    return await admission.aside(tenant, len(body), parsed, body, *(HOOKS if len(body) >= LONG_BYTES else ()))


def parsed(
    body: bytes, parse_int: Callable[[str], int] = int, parse_float: Callable[[str], float] = float
) -> dict[str, Any]:
    """See `parse`."""
    try:
        _check_body(body)
        found = json.loads(body.decode(), parse_int=parse_int, parse_float=parse_float, parse_constant=no_number)
        if SURROGATE.search(body):
            json.dumps(found, ensure_ascii=False).encode()  # half a character is no text, though JSON can spell it
    except InvalidParameter:
        raise
    except RecursionError:
        raise InvalidParameter("body", "is nested too deeply") from None
    except ValueError as error:  # also what is no text: UnicodeError is one
        raise InvalidParameter("body", f"is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidParameter("body", "must be a JSON object")
    return found


def _int(text: str) -> int:
    return int(text)


def _float(text: str) -> float:
    return float(text)


# The parser releases the interpreter's lock only when it calls Python functions: then other threads run.
HOOKS = _int, _float


def _check_body(body: bytes) -> None:
    """Most bodies have so few quotes and brackets that it does not matter which of them are within strings."""
    if body.count(b"[") + body.count(b"{") > MOST_DEPTH or body.count(b'"') // 2 > MOST_PARTS:
        JsonBounds().check(body, "body")


# ----------------------------------------------------------------------------------------------------------------------
# What the HTTP endpoints share: the orchestrator behind them, who calls, the served model and its template.


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request, read whole.

    headers: names in lower case. path: what the route's placeholders stand for. aside: as of `Admission.of` its body.
    """

    tenant: str
    body: bytes
    headers: dict[str, str]
    query: list[tuple[str, str]]
    path: dict[str, str]
    aside: Aside


class HttpService:
    """chats: its owner stops it. bodies: bytes of bodies that are in memory, by tenant."""

    def __init__(self, orchestrator: Orchestrator, chats: ChatModels) -> None:
        self.orchestrator = orchestrator
        self.handler = GenerationHandler(orchestrator)
        self.started = int(time.time())
        self.bodies: Counter[str] = Counter()
        self._chats = chats
        self._left: set[asyncio.Task[None]] = set()

    def served(self, model: str | None = None) -> ChatModel:
        """The target for new sessions of the model with this name; of the only model where no name is given.

        Raises:
            StatusError: UNAVAILABLE, no verifier has said yet what it serves.
            InvalidParameter: there are several models, and none is named.
            Failure: 404, another model was asked for.
        """
        try:
            return self._chats.of(self.orchestrator.pool.target_named(model or ""))
        except StatusError as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise
            raise Failure(404, error.message, INVALID, "model", "model_not_found") from None

    async def served_for(self, request: pb.GenerateRequest, tenant: str) -> ChatModel:
        """Like `served`, for the model that the request names, else its parent's."""
        if request.model or not request.parent:
            return self.served(request.model)
        return self._chats.of(await self.handler.target_for(request, tenant))

    def all_served(self) -> list[ChatModel]:
        """Every model, by rising name; at least one. Raises StatusError (UNAVAILABLE)."""
        pool = self.orchestrator.pool
        pool.require_target()
        return [self._chats.of(target) for target in pool.targets()]

    @property
    def most_body_bytes(self) -> int:
        """Most bytes of a body: as configured, else what the largest served context may need."""
        contexts = [target.context for target in self.orchestrator.pool.targets()]
        return self.orchestrator.options.http_access.body or most_body_bytes(max(contexts, default=0))

    async def fields(self, call: Call) -> Fields:
        """Fields of the JSON object in the body. Raises InvalidParameter; StatusError: no tokens are left."""
        self.orchestrator.admission.charge(call.tenant, len(call.body))
        return Fields(await parse(self.orchestrator.admission, call.body, call.tenant))

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

    def __init__(self, service: HttpService, answer: Responder, route: str, guarded: bool, observe: Observer) -> None:
        self._service = service
        self._answer = answer
        self._route = route
        self._guarded = guarded
        self._observe = observe

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
        space = BodyReservation(self._service.bodies, tenant)
        held.callback(space.release)
        body = await read_body(request.stream(), space, most)
        aside = self._service.orchestrator.admission.of(tenant, len(body))
        return Call(tenant, body, headers, request.query_params.multi_items(), dict(request.path_params), aside)

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
