"""Sessions that all begin at once, divided among orchestrators, and what came of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from bench.cluster.settings import PROMPT, VOCABULARY, ClusterRow
from specwire.client import AsyncClient, Chunk

LIMIT_S = 180.0

Text = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CrowdSession:
    """A text, and when so many tokens of it came, in seconds of the monotonic clock."""

    text: Text
    arrivals: tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class ServedCrowd:
    """seconds: from the first request to the last answer."""

    sessions: tuple[CrowdSession, ...]
    seconds: float

    @property
    def texts(self) -> tuple[Text, ...]:
        return tuple(session.text for session in self.sessions)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def steady(self) -> float:
        """Tokens per second while all sessions run: from when the last one has begun until the first one ends."""
        begin = max(session.arrivals[0][0] for session in self.sessions)
        end = min(session.arrivals[-1][0] for session in self.sessions)
        counted = sum(count for each in self.sessions for at, count in each.arrivals if begin < at <= end)
        return counted / (end - begin) if end > begin else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


async def served(row: ClusterRow, addresses: Sequence[str]) -> ServedCrowd:
    """addresses: of orchestrators. An ExceptionGroup where a session failed."""
    clients = [AsyncClient(address) for address in addresses[: row.orchestrators]]
    try:
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_run(row, turn, clients[turn % len(clients)])) for turn in range(row.at_once)]
        return ServedCrowd(tuple(task.result() for task in running), time.monotonic() - began)
    finally:
        for client in clients:
            await client.close()


def prompt(turn: int) -> Text:
    """Of a row's session of this number."""
    return tuple(2 + (turn // (VOCABULARY - 2) ** place) % (VOCABULARY - 2) for place in range(PROMPT))


async def _run(row: ClusterRow, turn: int, client: AsyncClient) -> CrowdSession:
    text: list[int] = []
    arrivals: list[tuple[float, int]] = []
    events = client.generate(
        prompt(turn),
        max_tokens=row.tokens,
        ignore_eos=True,
        drafting=row.drafting,
        ngram=False,
        model=row.model,
        timeout=LIMIT_S,
    )
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Chunk):
                text += event.tokens
                arrivals.append((event.received_ns / 1e9, len(event.tokens)))
    return CrowdSession(tuple(text), tuple(arrivals))
