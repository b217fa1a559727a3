"""The routes of the HTTP front door, who may call them from which page, and the small endpoints."""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.api.requests import encoded
from orchestrator.chat.models import ChatModel
from orchestrator.chat.talk import take_talk
from orchestrator.http.console import ConsoleEndpoints, page_routes
from orchestrator.http.endpoint import Call, Endpoint, HttpService, Responder
from orchestrator.http.errors import INVALID, Failure, failure_of, request_name
from orchestrator.http.openai.completions import Completions
from orchestrator.http.openai.responses import Responses
from orchestrator.options import ANY, HttpAccess
from orchestrator.sessions import ORCHESTRATOR
from specwire import __version__
from specwire.core.invalid import InvalidParameter
from specwire.rpc.channel import host_of, is_loopback
from specwire.telemetry.metrics import CONTENT_TYPE, Families, by_labels, counter

REQUEST_ID = "x-request-id"
# What may stand in a log line and in a header.
NAMED = re.compile(r"[!-~]{1,128}")


def application(service: HttpService) -> ASGIApp:
    """The endpoints, for whom may call. Health, readiness and version want no key, as gRPC's health checks do not."""
    access = service.orchestrator.options.http_access
    app: ASGIApp = routed(service)
    if access.origins:  # whose pages may read answers, by the CORS protocol of the WHATWG's Fetch standard
        origins = [each.lower() for each in access.origins]
        methods, shown = ("GET", "POST", "DELETE"), (REQUEST_ID, "retry-after")
        app = CORSMiddleware(app, origins, allow_methods=methods, allow_headers=("*",), expose_headers=shown)
    return RequestIds(OriginCheck(app, access, service.orchestrator.options.http))


class RequestIds:
    """ASGI middleware: each answer has an x-request-id, its request's own where that is a name, else one that is drawn.

    A failure of ours is logged with it. A request is repeated by another header, because proxies add this one by
    themselves (`orchestrator.http.openai.completions`).
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
    responses, info, metrics = Responses(service), Info(service), Metrics(service)

    def route(method: str, path: str, answer: Responder, guarded: bool = True) -> Route:
        return Route(path, Endpoint(service, answer, path, guarded, metrics.observe), methods=[method])

    routes = [
        route("POST", "/v1/completions", completions.complete),
        route("POST", "/v1/chat/completions", completions.chat),
        route("POST", "/v1/responses", responses.create),
        route("POST", "/v1/responses/compact", responses.compact),
        route("GET", "/v1/responses/{response}", responses.retrieve),
        route("DELETE", "/v1/responses/{response}", responses.delete),
        route("POST", "/v1/responses/{response}/cancel", responses.cancel),
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


# ----------------------------------------------------------------------------------------------------------------------
# Checks first of all whether the server answers to the called name, and whether the page's origin may call it.
#
# A page of any site can make its readers' browsers call a server that only they can reach: under an address of its own
# (cross-site requests), or under a name of its own that it has pointed at that server (DNS rebinding). The name that
# was called is in `Host`, the page's origin in `Origin` (RFC 6454), and no page's script can change either.

# What Sec-Fetch-Site says of pages of other origins.
ELSEWHERE = ("cross-site", "same-site")
LOCALHOST = "localhost"


class OriginCheck:
    """ASGI middleware. A refused caller's body is not read, nor one that no endpoint wanted: then the connection ends.

    listen: HOST:PORT as it was asked for. A host that is an address is always answered to: no other site can have an
    address as its name.
    """

    def __init__(self, app: ASGIApp, access: HttpAccess, listen: str) -> None:
        self._app = app
        self._any_host, self._any_origin = ANY in access.hosts, ANY in access.origins
        self._hosts = frozenset(each.lower() for each in (*access.hosts, *_own_names(host_of(listen))))
        self._origins = frozenset(each.lower() for each in access.origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope.get("headers", ())}
        unread = _has_body(headers)

        async def read() -> Message:
            nonlocal unread
            unread = False
            return await receive()

        async def told(message: Message) -> None:
            if unread and message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        try:
            self._check(scope["method"], headers)
        except Failure as failure:
            await failure.response()(scope, read, told)
            return
        await self._app(scope, read, told)

    def _check(self, method: str, headers: dict[str, str]) -> None:
        """Raises Failure."""
        host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
        self._check_host(host)
        if self.allows(origin, host):
            return
        if origin or (method == "POST" and headers.get("sec-fetch-site") in ELSEWHERE):
            message = f"Origin: pages of {origin or 'other sites'} may not call this server; --http-origin allows one"
            raise Failure(403, message, INVALID, None, "cross_site")

    def allows(self, origin: str, host: str) -> bool:
        """Whether the page that calls is this server's own, or one of an origin that was allowed by name.

        A proxy may have ended the encryption, so the scheme of the page is not known here.
        """
        if not origin:
            return False
        return self._any_origin or origin in self._origins or (bool(host) and origin.partition("://")[2] == host)

    def _check_host(self, host: str) -> None:
        """Raises Failure. HTTP/1.0 knows no Host, and no browser of today speaks it."""
        if self._any_host or not host:
            return
        name = _name_of(host)
        if name is None or not (name in self._hosts or name.endswith(f".{LOCALHOST}") or _is_address(name)):
            message = f"Host: this server does not answer to {host!r}; --http-host NAME adds a name"
            raise Failure(421, message, INVALID, None, "unknown_host")


def _own_names(host: str) -> Iterable[str]:
    """Names without a flag: a machine's own only where others may call."""
    return (LOCALHOST, host) if is_loopback(host or LOCALHOST) else (LOCALHOST, host, socket.gethostname())


def _name_of(host: str) -> str | None:
    """Host without the port, and without IPv6's brackets; None where it is no host."""
    with suppress(ValueError):
        parts = urlsplit(f"//{host}")
        if parts.netloc == host and "@" not in host and (parts.port is None or parts.port > 0):
            return (parts.hostname or "").removesuffix(".") or None
    return None


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False


def _has_body(headers: dict[str, str]) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != ""


# ----------------------------------------------------------------------------------------------------------------------
# /metrics: the orchestrator's figures (`orchestrator.metrics`), and HTTP's own.


class Metrics:
    """The page of figures; it also counts HTTP's own answers (`observe`)."""

    def __init__(self, service: HttpService) -> None:
        self._answers: Counter[tuple[str, int]] = Counter()
        self._registry = service.orchestrator.registry
        self._registry.add(ORCHESTRATOR, self._families)

    def observe(self, route: str, status: int) -> None:
        self._answers[route, status] += 1

    async def answer(self, _: Call) -> Response:
        return PlainTextResponse(self._registry.text(), media_type=CONTENT_TYPE)

    def _families(self) -> Families:
        counts = sorted(self._answers.items())
        samples = (((route, str(status)), count) for (route, status), count in counts)
        told = "HTTP answers by route and status."
        yield by_labels(counter, "http_responses_total", told, ("route", "status"), samples)


# ----------------------------------------------------------------------------------------------------------------------
# The small endpoints: models, health, version, tokens.

# Of a token's text in an answer.
TEXT_BYTES = 16


class Info:
    """Each takes a call and gives a response."""

    def __init__(self, service: HttpService) -> None:
        self._service = service
        self._admission = service.orchestrator.admission

    async def models(self, _: Call) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(each) for each in self._service.all_served()]})

    async def model(self, call: Call) -> Response:
        return JSONResponse(self._model(self._service.served(call.path["model"])))

    def _model(self, served: ChatModel) -> dict[str, Any]:
        return {
            "id": served.name,
            "object": "model",
            "created": self._service.started,
            "owned_by": "specwire",
            "root": served.name,
            "parent": None,
            "max_model_len": served.target.context,
        }

    async def health(self, _: Call) -> Response:
        """The process answers; `ready` tells whether it can generate."""
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Call) -> Response:
        reason = self._service.orchestrator.unready
        return JSONResponse({"ready": reason is None, "reason": reason}, 200 if reason is None else 503)

    async def version(self, _: Call) -> Response:
        return JSONResponse({"version": __version__})

    async def tokenize(self, call: Call) -> Response:
        """`prompt`, or `messages` as the model's chat template writes them, as the model's tokens."""
        fields = await self._service.fields(call)
        served = self._service.served(fields.text("model"))
        prompt = fields.text("prompt")
        if prompt is None:
            prompt = (await served.chat(await call.aside(take_talk, fields), call.aside)).text
        fields.fixed("add_special_tokens", False)
        with_texts = fields.flag("return_token_strs")
        fields.end()
        tokens = await encoded(prompt, served.target)
        context, texts = served.target.context, None
        if with_texts:
            of_text = self._admission.of(call.tenant, TEXT_BYTES * len(tokens))
            texts = await of_text(lambda: list(map(served.names.text, tokens)))
        return JSONResponse({"count": len(tokens), "max_model_len": context, "tokens": tokens, "token_strs": texts})

    async def detokenize(self, call: Call) -> Response:
        fields = await self._service.fields(call)
        served = self._service.served(fields.text("model"))
        tokens = await call.aside(fields.ids, "tokens", served.target.context)
        fields.end()
        vocabulary = served.target.info.vocabulary
        if max(tokens, default=0) >= vocabulary:
            raise InvalidParameter("tokens", f"token id {max(tokens)} is outside 0..{vocabulary - 1}")
        return JSONResponse({"prompt": served.target.tokenizer.decode(tokens, skip_special_tokens=False)})
