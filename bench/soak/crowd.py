"""A thousand clients: as many sessions at a time as asked for, each replaced by another once it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from random import Random

from specwire.client import AsyncClient, Chunk, Event, SpecwireError, Started

PROMPT_TOKENS = 16
SHORTEST, LONGEST = 50, 250
VOCABULARY = 64
# Behind so many tokens an idle reader stops reading; its session is long enough never to end.
READ_FIRST, UNREAD = 16, 4000
# Every so many sessions are kept for the judge.
JUDGED = 50


@dataclass(slots=True)
class Crowd:
    """Sessions in motion.

    Attributes:
        tokens: received so far, by all.
        running: sessions that have a place, or wait for one at a verifier, and have not ended.
        texts: (prompt, tokens) of some that have ended.
        idle: ids of the sessions that nobody reads on.
    """

    client: AsyncClient
    seed: int
    limit_s: float
    tokens: int = 0
    running: int = 0
    ended: int = 0
    errors: list[str] = field(default_factory=list)
    texts: list[tuple[tuple[int, ...], list[int]]] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)

    async def go_on(self, until: asyncio.Event) -> None:
        """One session after the other; the last one is left where it is.

        The first one is cut short by chance, so that sessions of every age are there early in the run.
        """
        first = True
        while not until.is_set():
            number = next(self._numbers)
            random = Random(f"{self.seed}/{number}")
            prompt = tuple(random.randrange(2, VOCABULARY) for _ in range(PROMPT_TOKENS))
            shortest = 1 if first else SHORTEST
            first = False
            events = self.client.generate(
                prompt, max_tokens=random.randint(shortest, LONGEST), ignore_eos=True, timeout=self.limit_s
            )
            tokens = await self._read(events, until.is_set)
            if number % JUDGED == 0:
                self.texts.append((prompt, tokens))

    async def hold(self, until: asyncio.Event) -> None:
        """One session that is read for a little while, and then is not, and does not end."""
        prompt = [2 + len(self.idle)] * PROMPT_TOKENS
        events = self.client.generate(prompt, max_tokens=UNREAD, ignore_eos=True, timeout=self.limit_s)
        seen = 0
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Started):
                        self.idle.append(event.session_id)
                    seen += len(event.tokens) if isinstance(event, Chunk) else 0
                    if seen >= READ_FIRST:
                        await until.wait()
                        return
        except SpecwireError as error:
            self.errors.append(str(error))

    async def lengths(self) -> list[int]:
        """How far each idle session has been decided."""
        states = [await self.client.get_session(session_id) for session_id in self.idle]
        return [len(state.tokens) - state.prompt_tokens for state in states]

    async def _read(self, events: AsyncGenerator[Event, None], over: Callable[[], bool]) -> list[int]:
        tokens: list[int] = []
        begun = 0
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Started) and not begun:
                        begun = 1
                        self.running += begun
                    if isinstance(event, Chunk):
                        tokens += event.tokens
                        self.tokens += len(event.tokens)
                    if over():
                        return tokens
            self.ended += 1
        except SpecwireError as error:
            self.errors.append(str(error))
        finally:
            self.running -= begun
        return tokens
