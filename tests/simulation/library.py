"""A client that is the project's own library: how it comes back after a failure is its affair."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from specwire.client import AsyncClient, Chunk, Event, Finished, SpecwireError, Started
from specwire.v1 import generation_pb2 as pb
from tests.simulation.client import PATIENCE, Heard
from tests.simulation.scenario import Ask

DRAFTING = {2: (False, False), 3: (True, False), 4: (False, True)}


class LibraryClient:
    """One request, as SimClient makes it, through specwire.client."""

    def __init__(self, addresses: list[str], ask: Ask, report: Callable[[str], None]) -> None:
        self.heard = Heard(ask)
        self._addresses = [*addresses[ask.at :], *addresses[: ask.at]]
        self._report = report

    async def run(self) -> None:
        await asyncio.sleep(self.heard.ask.start)
        async with AsyncClient(self._addresses, patience=PATIENCE) as client:
            try:
                await self._read(client)
            except SpecwireError as error:
                self.heard.error, self.heard.details = error.code, error.message
        self.heard.done = True

    async def _read(self, client: AsyncClient) -> None:
        ask = self.heard.ask
        drafting, ngram = DRAFTING.get(ask.drafting, (True, True))
        stream = client.generate(
            list(ask.prompt),
            timeout=ask.timeout or PATIENCE,
            max_tokens=ask.max_tokens,
            temperature=ask.temperature,
            seed=ask.seed,
            stop=ask.stop,
            request_id=ask.request_id,
            drafting=drafting,
            ngram=ngram,
            provisional=ask.provisional,
        )
        async with aclosing(stream) as events:
            async for event in events:
                await asyncio.sleep(ask.reading)
                self._take(event)
                if self.heard.has(ask.leave_after):
                    self.heard.left = True
                    return
                if self.heard.has(ask.cancel_after) and not self.heard.cancelled:
                    self.heard.cancelled = True
                    await client.cancel(self.heard.session_id, timeout=PATIENCE)

    def _take(self, event: Event) -> None:
        heard = self.heard
        match event:
            case Started():
                heard.session_id = event.session_id
            case Chunk():
                position = len(heard.ask.prompt) + len(heard.tokens)
                if event.position != position:
                    self._report(f"the library gave a chunk at {event.position} where {position} was due")
                heard.tokens += event.tokens
                heard.text += event.text
            case Finished():
                heard.text += event.text
                heard.end = pb.Finished(reason=event.reason, text_length=event.text_length)  # type: ignore[arg-type]  # the enum's numbers are the wire's
