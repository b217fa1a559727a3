"""One HTTP endpoint: who calls, then the body, the answer, what went wrong, and that nobody works for who has left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.http.bodies import Bodies, check_length, read_body
from orchestrator.http.errors import failure_of
from orchestrator.http.service import Call, HttpService
from orchestrator.tenants import ANONYMOUS

Answering = Callable[[Call], Awaitable[ASGIApp]]
# Is told the route and the status of every answer.
Observer = Callable[[str, int], None]


class Endpoint:
    """An ASGI application. answer: what it does. guarded: callers need a key, where keys are asked for."""

    def __init__(
        self, service: HttpService, answer: Answering, route: str, guarded: bool, observe: Observer, bodies: Bodies
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
        tenant = self._service.generating.tenant(headers.items()) if self._guarded else ANONYMOUS
        most = self._service.most_body_bytes
        check_length(headers.get("content-length", ""), most)
        space = held.enter_context(self._bodies.of(tenant))
        body = await read_body(request.stream(), space, most)
        return Call(tenant, body, headers, dict(request.query_params), dict(request.path_params))

    async def _respond(self, call: Call, held: ExitStack, scope: Scope, receive: Receive, send: Send) -> None:
        """held: what the body takes, until an answer begins."""
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
    """Do `work`, whose caller may leave: then it is cancelled at once."""
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
