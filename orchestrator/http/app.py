"""The routes of the HTTP front door."""

from __future__ import annotations

import re
import secrets

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.http.bodies import Bodies
from orchestrator.http.completions import Completions
from orchestrator.http.console import ConsoleEndpoints
from orchestrator.http.endpoint import Endpoint, HttpService, Responder
from orchestrator.http.errors import failure_of, request_name
from orchestrator.http.info import Info, Metrics
from orchestrator.http.origins import OriginCheck
from orchestrator.http.page import routes as page_routes
from orchestrator.options import HttpAccess

REQUEST_ID = "x-request-id"
# What may stand in a log line and in a header.
NAMED = re.compile(r"[!-~]{1,128}")


def application(service: HttpService) -> ASGIApp:
    """The endpoints, for whom may call. Health, readiness and version want no key, as gRPC's health checks do not."""
    options = service.orchestrator.options
    answered = shared(routed(service), options.http_access)
    return RequestIds(OriginCheck(answered, options.http_access, options.http))


def shared(app: ASGIApp, access: HttpAccess) -> ASGIApp:
    """Answers that pages of the allowed origins may read, by the CORS protocol of the WHATWG's Fetch standard."""
    if not access.origins:
        return app
    origins = [each.lower() for each in access.origins]
    return CORSMiddleware(
        app, origins, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=(REQUEST_ID, "retry-after")
    )


class RequestIds:
    """ASGI middleware: each answer has an x-request-id, its request's own where that is a name, else one that is drawn.

    A failure of ours is logged with it. A request is repeated by another header (`orchestrator.http.completions`),
    because proxies add this one by themselves.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = Headers(scope=scope).get(REQUEST_ID, "")
        name = asked if NAMED.fullmatch(asked) else f"req_{secrets.token_hex(16)}"

        request_name.set(name)

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (REQUEST_ID.encode(), name.encode())]}
            await send(message)

        await self._app(scope, receive, told)


def routed(service: HttpService) -> Starlette:
    """All endpoints."""
    completions, console = Completions(service), ConsoleEndpoints(service)
    info, metrics, bodies = Info(service), Metrics(service), Bodies()

    def route(method: str, path: str, answer: Responder, guarded: bool = True) -> Route:
        return Route(path, Endpoint(service, answer, path, guarded, metrics.observe, bodies), methods=[method])

    routes = [
        route("POST", "/v1/completions", completions.complete),
        route("POST", "/v1/chat/completions", completions.chat),
        route("GET", "/v1/models", info.models),
        route("GET", "/v1/models/{model:path}", info.model),
        route("POST", "/tokenize", info.tokenize),
        route("POST", "/detokenize", info.detokenize),
        route("POST", "/console/generate", console.generate),
        route("GET", "/console/status", console.status),
        route("GET", "/metrics", metrics.answer),
        route("GET", "/health", info.health, guarded=False),
        route("GET", "/ready", info.ready, guarded=False),
        route("GET", "/version", info.version, guarded=False),
        *page_routes(),
    ]
    # Starlette's own 404 and 405; endpoints deal with their failures themselves.
    return Starlette(routes=routes, exception_handlers={404: _refuse, 405: _refuse})


async def _refuse(request: Request, error: Exception) -> Response:
    """An error that names the path or method; for a wrong method the header `Allow` lists the right ones."""
    failure = failure_of(error)
    failure.message = f"{request.method} {request.url.path}: {failure.message}"
    response = failure.response()
    response.headers.update(error.headers or {} if isinstance(error, HTTPException) else {})
    return response
