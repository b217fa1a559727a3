"""A thousand clients: as many sessions at a time as asked for, each replaced by another once it has ended.

Lengths are drawn from an exponential law, so a session's age does not tell how much of it is left, and the mix of ages
is soon steady. With other lengths sessions that begin together stay in step for minutes, and their memory goes up and
down with their age by tens of MiB.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from random import Random

from specwire.client import AsyncClient, Chunk, Event, SpecwireError, Started

PROMPT_TOKENS = 16
MEAN_LENGTH, LONGEST = 75, 600
VOCABULARY = 64
# Behind so many tokens an idle reader stops reading; its session is long enough never to end.
READ_FIRST, UNREAD = 16, 4000
# Every so many sessions are kept for the judge.
JUDGED = 50
# Sessions at a time that only come and go.
PASSING = 64


def length(random: Random) -> int:
    return min(LONGEST, 1 + int(random.expovariate(1 / MEAN_LENGTH)))


@dataclass(slots=True)
class SessionCrowd:
    """Sessions in motion.

    Attributes:
        tokens: received so far, by all.
        gone: sessions that have ended, by themselves or because they were left.
        texts: (prompt, tokens) of some that have ended.
        idle: ids of the sessions that nobody reads on.
    """

    client: AsyncClient
    seed: int
    limit_s: float
    tokens: int = 0
    ended: int = 0
    gone: int = 0
    errors: list[str] = field(default_factory=list)
    texts: list[tuple[tuple[int, ...], list[int]]] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)

    async def pass_through(self, sessions: int) -> None:
        """So many sessions of one token: whatever is remembered of the latest ones is full then. They do not count."""
        left = iter(range(sessions))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(PASSING, sessions)):
                tasks.create_task(self._pass(left))
        self.tokens = self.ended = 0

    async def _pass(self, left: Iterator[int]) -> None:
        for _ in left:
            await self._one(1, lambda _: 1, lambda: False)

    async def go_on(self, until: asyncio.Event) -> None:
        """One session after the other; the last one is left where it is."""
        while not until.is_set():
            await self._one(PROMPT_TOKENS, length, until.is_set)

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

    async def _one(self, tokens: int, drawn: Callable[[Random], int], over: Callable[[], bool]) -> None:
        """With a prompt of so many tokens."""
        number = next(self._numbers)
        random = Random(f"{self.seed}/{number}")
        prompt = tuple(random.randrange(2, VOCABULARY) for _ in range(tokens))
        most = drawn(random)
        events = self.client.generate(prompt, max_tokens=most, ignore_eos=True, timeout=self.limit_s)
        output = await self._read(events, over)
        if number % JUDGED == 0:
            self.texts.append((prompt, output))

    async def _read(self, events: AsyncGenerator[Event, None], over: Callable[[], bool]) -> list[int]:
        tokens: list[int] = []
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Chunk):
                        tokens += event.tokens
                        self.tokens += len(event.tokens)
                    if over():
                        return tokens
            self.ended += 1
        except SpecwireError as error:
            self.errors.append(str(error))
        finally:
            self.gone += 1
        return tokens
