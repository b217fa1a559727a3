"""Server-sent events (the WHATWG's HTML standard, section 9.2), as OpenAI's API ends them: with [DONE]."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that gather an answer would undo the stream
]


def event(data: object, place: str | None = None) -> bytes:
    """place: the event's id, which a client that comes back shows as Last-Event-ID."""
    head = "" if place is None else f"id: {place}\n"
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode(errors="replace")


class EventStream:
    """A response whose events are closed with it, whatever ends it.

    A client that reads slowly is waited for: nothing more is taken from `events` than its connection takes.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
