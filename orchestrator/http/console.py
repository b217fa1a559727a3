"""The console: its page, and what that asks for: one session with all that happens in it, and the state of services.

Not a public interface: it changes with the page (`page/`), which has no build step and asks nobody but the orchestrator
that it came from.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from orchestrator.api.calls import Part
from orchestrator.chat.models import ChatModel
from orchestrator.http.endpoint import Call, HttpService
from orchestrator.http.errors import failure_of
from orchestrator.http.openai.answers import DONE, EventStream, event
from orchestrator.http.openai.completions import prompts_of, sessions_of
from orchestrator.http.openai.requests import take_completion
from orchestrator.peers.peer import DrafterPeer, VerifierPeer
from orchestrator.session.driver import SessionDriver
from orchestrator.session.output import SessionView
from orchestrator.session.stats import Traced, TracedProposal, TracedVerdict, now_us
from specwire.core.invalid import InvalidParameter
from specwire.core.law.sampling import finite
from specwire.core.messages import Emit, EmitEnd
from specwire.rpc.link import Link

Json = dict[str, Any]

# Most events that wait for a page that reads slowly. Further events beside the text are left out.
MOST_WAITING = 256
MOST_SESSIONS = 100


class ConsoleEndpoints:
    """Endpoints; each takes a call and gives a response."""

    def __init__(self, service: HttpService) -> None:
        self._service = service

    async def generate(self, call: Call) -> ASGIApp:
        """A completion's fields with one prompt; answers a stream of events by `type`, errors included."""
        fields = await self._service.fields(call)
        prompts = await call.aside(prompts_of, fields.take("prompt"))
        request = take_completion(fields, "")
        fields.end()
        served = self._service.served(request.template.model)
        requests = sessions_of(request, prompts)
        if len(requests) != 1:
            raise InvalidParameter("n", f"the console shows one session, not {len(requests)}")
        watched = ConsoleStream(served)
        handler = self._service.handler
        (seed,) = await handler.seeds.of(request.template, call.tenant)
        parts = handler.generate(requests[0], call.tenant, request.timeout, seed, trace=watched.note)
        quiet = self._service.orchestrator.options.sse_keep_alive
        return EventStream(watched.stream(parts), quiet)

    async def status(self, call: Call) -> Response:
        """Services, and the caller's own sessions."""
        orchestrator = self._service.orchestrator
        pool, served = orchestrator.pool, self._service.all_served()[0]
        own = [each for each in orchestrator.sessions.values() if each.view.record.tenant == call.tenant]
        running = [each for each in own if each.view.output.end is None]
        return JSONResponse(
            {
                "target": {"model": served.name, "vocabulary": served.target.info.vocabulary},
                "context": served.target.context,
                "durability": orchestrator.store.durability,
                "log_trouble": orchestrator.log.trouble,
                "unready": orchestrator.unready,
                "verifiers": [_verifier(each) for each in pool.verifiers],
                "drafters": [_peer(each) for each in pool.drafters],
                "sessions": [_session(each) for each in running[-MOST_SESSIONS:]],
            }
        )


def _verifier(peer: VerifierPeer) -> Json:
    return {**_peer(peer), "draining": peer.draining, "forward_us": round(peer.step_us)}


def _peer(peer: VerifierPeer | DrafterPeer) -> Json:
    """round_trip_us: 0 for one that has dialled in, and before the link was ever up."""
    link = peer.link if isinstance(peer.link, Link) else None
    return {
        "model": peer.info.model if peer.info else "",
        "up": peer.up,
        "sessions": len(peer.subjects),
        "slots": peer.info.slots if peer.info else 0,
        "round_trip_us": round(link.round_trip_us) if link is not None else 0,
    }


def _session(driver: SessionDriver) -> Json:
    view = driver.view
    return {
        "id": view.record.session_id[:8],
        "state": driver.session.state.value,
        "tokens": len(view.output.tokens),
        "plan": view.stats.plan,
    }


class ConsoleStream:
    """One session's events for the page, in the order in which they happened."""

    def __init__(self, served: ChatModel) -> None:
        self._served = served
        self._waiting: asyncio.Queue[Json | None] = asyncio.Queue(MOST_WAITING)

    def note(self, traced: Traced) -> None:
        """Something happened in the session."""
        with suppress(asyncio.QueueFull):
            self._waiting.put_nowait(self._traced(traced))

    async def stream(self, parts: AsyncGenerator[Part, None]) -> AsyncGenerator[bytes, None]:
        """Events until the session's end. The session ends when this is closed."""
        pumping = asyncio.create_task(self._pump(parts))
        try:
            while (told := await self._waiting.get()) is not None:
                yield event(told)
            yield DONE
        finally:
            pumping.cancel()
            await asyncio.gather(pumping, return_exceptions=True)

    async def _pump(self, parts: AsyncGenerator[Part, None]) -> None:
        try:
            async with aclosing(parts):
                async for part in parts:
                    await self._waiting.put(self._part(part))
        except Exception as error:
            await self._waiting.put({"type": "error", "message": failure_of(error).message})
        await self._waiting.put(None)

    def _part(self, part: Part) -> Json:
        match part:
            case SessionView():
                return {"type": "started", "prompt_tokens": len(part.record.prompt), "at_us": now_us()}
            case Emit():
                return {
                    "type": "chunk",
                    "at_us": now_us(),
                    "position": part.position,
                    "tokens": part.tokens,
                    "outcomes": [each.name.lower() for each in part.outcomes],
                    "text": part.text,
                    "ends": part.text_ends,
                    "logprobs": [finite(known.logprob) for known in part.logprobs],
                }
            case EmitEnd():
                return {
                    "type": "finished",
                    "at_us": now_us(),
                    "reason": part.end.reason.name.lower(),
                    "text": part.text,
                    "text_length": part.end.text_length,
                }

    def _traced(self, traced: Traced) -> Json:
        texts = [self._served.names.text(token) for token in traced.tokens]
        match traced:
            case TracedProposal():
                return {"type": "proposed", "texts": texts, **asdict(traced)}
            case TracedVerdict():
                names = [outcome.name.lower() for outcome in traced.outcomes]
                return {"type": "judged", "texts": texts, **asdict(traced), "outcomes": names}


# ----------------------------------------------------------------------------------------------------------------------
# The page.

PAGE = Path(__file__).resolve().parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def page_routes() -> list[Route]:
    """The page at `/`, its parts below `/console/`. Open to everybody: they hold no user's data."""
    files = {file.name: file for file in PAGE.iterdir() if file.suffix in TYPES}
    served = {"/" if name == "index.html" else f"/console/{name}": file for name, file in files.items()}
    return [Route(path, _giving(file), methods=["GET"]) for path, file in sorted(served.items())]


def _giving(file: Path) -> Callable[[Request], Awaitable[Response]]:
    content, kind = file.read_bytes(), TYPES[file.suffix]

    async def give(_: Request) -> Response:
        return Response(content, media_type=kind, headers=PAGE_HEADERS)

    return give
