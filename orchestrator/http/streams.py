"""Server-sent events (the WHATWG's HTML standard, section 9.2), as OpenAI's API ends them: with [DONE]."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing

from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
# A line that every reader of events skips.
COMMENT = b": nothing yet\n\n"

Leave = Callable[[], Awaitable[object]]
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that gather an answer would undo the stream
]


def event(data: object, place: str | None = None) -> bytes:
    """place: the event's id, which a client that comes back shows as Last-Event-ID."""
    head = "" if place is None else f"id: {place}\n"
    written = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"{head}data: {written}\n\n".encode(errors="replace")


class EventStream:
    """A response whose events are closed with it, whatever ends it.

    A client that reads slowly is waited for: nothing more is taken from `events` than its connection takes.
    Where nothing comes for `quiet` seconds, a comment does: proxies cut what is silent. leave: called when all is over.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], quiet: float, leave: Leave | None = None) -> None:
        self._events = events
        self._quiet = quiet
        self._leave = leave
        self._sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as held:
            if self._leave is not None:
                held.push_async_callback(self._leave)
            await held.enter_async_context(aclosing(self._events))
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            beating = asyncio.create_task(self._beat(send))
            try:
                async for data in self._events:
                    await self._send(send, data)
            finally:
                beating.cancel()
                await asyncio.gather(beating, return_exceptions=True)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._sent = asyncio.get_running_loop().time()

    async def _beat(self, send: Send) -> None:
        """A comment whenever nothing was sent for long enough; waits where the client does not read, as events do."""
        clock = asyncio.get_running_loop().time
        self._sent = clock()
        while True:
            await asyncio.sleep(self._sent + self._quiet - clock())
            if clock() >= self._sent + self._quiet:
                await self._send(send, COMMENT)
