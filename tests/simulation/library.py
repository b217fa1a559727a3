"""A client that is the project's own library: how it comes back after a failure is its affair."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress

from specwire.client import AsyncClient, Chunk, Event, Finished, SpecwireError, Started
from tests.simulation.asking import Asking
from tests.simulation.client import PATIENCE
from tests.simulation.hearing import Begun, Ended, Heard


class LibraryClient:
    """One request, as SimClient makes it, through specwire.client."""

    def __init__(self, addresses: Sequence[str], asking: Asking) -> None:
        self.hearings = asking.hearings()
        self._asking = asking
        self._ask = asking.ask
        self._addresses = [*addresses[self._ask.at :], *addresses[: self._ask.at]]

    @property
    def _heard(self) -> Heard:
        return self.hearings[0]

    async def run(self) -> None:
        await asyncio.sleep(self._ask.start)
        if await self._asking.ready(self.hearings):
            async with AsyncClient(self._addresses, token=self._asking.token, patience=PATIENCE) as client:
                try:
                    await self._read(client)
                except SpecwireError as error:
                    self._heard.error, self._heard.details = error.code, error.message
        self._heard.done = True

    async def _read(self, client: AsyncClient) -> None:
        heard, ask = self._heard, self._ask
        heard.attempts += 1
        stream = client.generate(list(ask.prompt), timeout=ask.timeout or PATIENCE, **self._asking.options())
        async with aclosing(stream) as events:
            async for event in events:
                await asyncio.sleep(ask.reading)
                self._take(event)
                if heard.has(ask.leave_after):
                    heard.left = True
                    if not ask.request_id:
                        self._asking.facts.end(heard.session_id)  # the library cancels what only it can come back to
                    return
                await self._interfere(client)

    async def _interfere(self, client: AsyncClient) -> None:
        heard = self._heard
        if heard.has(self._ask.cancel_after) and not heard.cancelled:
            heard.cancelled = True
            self._asking.facts.end(heard.session_id)
            with suppress(SpecwireError):
                await client.cancel(heard.session_id, timeout=PATIENCE)
                self._asking.facts.told_cancelled(heard.session_id)
        if heard.has(self._ask.delete_after) and not heard.deleted:
            heard.deleted = True
            self._asking.facts.end(heard.session_id)
            with suppress(SpecwireError):
                await client.delete_session(heard.session_id, timeout=PATIENCE)
                self._asking.facts.told_deleted(heard.session_id)

    def _take(self, event: Event) -> None:
        heard = self._heard
        match event:
            case Started():
                heard.session_id = event.session_id
                prompt = None if event.prompt is None else event.prompt.tokens
                heard.started = Begun(event.prompt_tokens, event.prompt_hash, event.lossy, prompt)
            case Chunk():
                position = len(heard.prompt) + len(heard.tokens)
                if event.position != position:
                    message = f"the library gave a chunk at {event.position} where {position} was due"
                    self._asking.facts.report(message)
                heard.tokens += event.tokens
                heard.logprobs += event.logprobs
                heard.text += event.text
            case Finished():
                heard.text += event.text
                heard.end = Ended(event.reason, event.text_length, event.lossy, event.stats.cached_tokens)
