"""The console's files: one page without a build step, which asks nobody but the orchestrator that it came from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

HERE = Path(__file__).resolve().parent
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def routes() -> list[Route]:
    """The page at `/`, its parts below `/console/`. Open to everybody: they hold no user's data."""
    files = {file.name: file for file in HERE.iterdir() if file.suffix in TYPES}
    served = {"/" if name == "index.html" else f"/console/{name}": file for name, file in files.items()}
    return [Route(path, _giving(file), methods=["GET"]) for path, file in sorted(served.items())]


def _giving(file: Path) -> Callable[[Request], Awaitable[Response]]:
    content, kind = file.read_bytes(), TYPES[file.suffix]

    async def give(_: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return give
