"""The routes of the HTTP front door."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from orchestrator.http.bodies import Bodies
from orchestrator.http.completions import Completions
from orchestrator.http.endpoint import Answering, Endpoint
from orchestrator.http.errors import failure_of
from orchestrator.http.info import Info
from orchestrator.http.looking import Looking
from orchestrator.http.metrics import Metrics
from orchestrator.http.origins import OriginCheck
from orchestrator.http.page import routes as page_routes
from orchestrator.http.service import Service


def application(service: Service) -> ASGIApp:
    """The endpoints, for whom may call. Health, readiness and version want no key, as gRPC's health checks do not."""
    options = service.orchestrator.options
    return OriginCheck(routed(service), options.http_access, options.http)


def routed(service: Service) -> Starlette:
    """All endpoints."""
    completions, info, metrics, looking = Completions(service), Info(service), Metrics(service), Looking(service)
    bodies = Bodies()

    def route(method: str, path: str, answer: Answering, guarded: bool = True) -> Route:
        return Route(path, Endpoint(service, answer, path, guarded, metrics.observe, bodies), methods=[method])

    routes = [
        route("POST", "/v1/completions", completions.complete),
        route("POST", "/v1/chat/completions", completions.chat),
        route("GET", "/v1/models", info.models),
        route("GET", "/v1/models/{model:path}", info.model),
        route("POST", "/tokenize", info.tokenize),
        route("POST", "/detokenize", info.detokenize),
        route("POST", "/console/generate", looking.generate),
        route("GET", "/console/status", looking.status),
        route("GET", "/metrics", metrics.answer),
        route("GET", "/health", info.health, guarded=False),
        route("GET", "/ready", info.ready, guarded=False),
        route("GET", "/version", info.version, guarded=False),
        *page_routes(),
    ]
    # Starlette's own 404 and 405; endpoints deal with their failures themselves.
    return Starlette(routes=routes, exception_handlers={404: _refuse, 405: _refuse})


async def _refuse(request: Request, error: Exception) -> Response:
    """Names what there is not; of another method's headers one says which there are (`Allow`)."""
    failure = failure_of(error)
    failure.message = f"{request.method} {request.url.path}: {failure.message}"
    response = failure.response()
    response.headers.update(error.headers or {} if isinstance(error, HTTPException) else {})
    return response
