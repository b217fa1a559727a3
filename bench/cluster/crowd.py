"""Sessions that all begin at once, divided among orchestrators, and what came of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.cluster.settings import PROMPT, VOCABULARY, Row
from specwire.client import AsyncClient

LIMIT_S = 180.0

Text = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Served:
    """texts: of the sessions, in turn. seconds: from the first request to the last answer."""

    texts: tuple[Text, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


async def served(row: Row, addresses: Sequence[str]) -> Served:
    """addresses: of orchestrators. An ExceptionGroup where a session failed."""
    clients = [AsyncClient(address) for address in addresses[: row.orchestrators]]
    try:
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_text(row, turn, clients[turn % len(clients)])) for turn in range(row.at_once)]
        return Served(tuple(task.result() for task in running), time.monotonic() - began)
    finally:
        for client in clients:
            await client.close()


def prompt(turn: int) -> Text:
    """Of a row's session of this number."""
    return tuple(2 + (turn // (VOCABULARY - 2) ** place) % (VOCABULARY - 2) for place in range(PROMPT))


async def _text(row: Row, turn: int, client: AsyncClient) -> Text:
    done = await client.complete(
        prompt(turn),
        max_tokens=row.tokens,
        ignore_eos=True,
        drafting=row.drafting,
        ngram=False,
        model=row.model,
        timeout=LIMIT_S,
    )
    return done.tokens
