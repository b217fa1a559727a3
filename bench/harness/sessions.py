"""Sessions of ours through gRPC: what one took, and several that begin at once in one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from bench.harness.runs import Arrival, BenchError, Run
from specwire.client import AsyncClient, Chunk, Event, Finished, SpecwireError, Started
from specwire.core.messages import FinishReason

LOAD_LIMIT = 600.0
RUN_LIMIT = 600.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked:
    """How sessions are asked for: the address, whether anything may propose, and how tokens are drawn."""

    client: AsyncClient
    label: str
    drafting: bool
    temperature: float = 0.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Together:
    """Sessions that began at once. seconds: until the last one's last token."""

    seconds: float
    runs: tuple[Run, ...]


def run_of(events: Sequence[Event], began_ns: int, ended_ns: int, tokens: int, label: str, drafting: bool) -> Run:
    """What a generation's events say of it; BenchError unless it has exactly `tokens` tokens."""
    chunks = [event for event in events if isinstance(event, Chunk)]
    stats = _finished(events[-1] if events else None, label).stats
    return Run(
        tokens=exactly(tokens, [token for chunk in chunks for token in chunk.tokens], label),
        seconds=(ended_ns - began_ns) / 1e9,
        first_token_seconds=(chunks[0].received_ns - began_ns) / 1e9,
        forwards=stats.target_forwards,
        tested=sum(stats.tested_at) if drafting else None,
        accepted=sum(stats.accepted_at) if drafting else None,
        arrivals=tuple(Arrival(len(chunk.tokens), chunk.received_ns, chunk.timings) for chunk in chunks),
        plan=stats.plan,
        stats=stats,
    )


def _finished(event: Event | None, label: str) -> Finished:
    if not isinstance(event, Finished):
        raise BenchError(f"{label}: the stream ended too early")
    if event.reason is not FinishReason.LENGTH:
        raise BenchError(f"{label}: ended with {event.reason.name.lower()}, {event.message or 'no message'}")
    return event


def exactly(wanted: int, tokens: Sequence[int], label: str) -> tuple[int, ...]:
    if len(tokens) != wanted:
        raise BenchError(f"{label}: gave {len(tokens)} tokens, not {wanted}; is prompt + tokens beyond the context?")
    return tuple(tokens)


async def generate(asked: Asked, prompt: Sequence[int], tokens: int) -> tuple[str, Run]:
    """One session, from now to its last token; its id, and what it took.

    Raises:
        SpecwireError, BenchError.
    """
    began_ns = time.monotonic_ns()
    stream = asked.client.generate(
        prompt,
        max_tokens=tokens,
        ignore_eos=True,
        drafting=asked.drafting,
        temperature=asked.temperature,
        seed=asked.seed,
        timeout=RUN_LIMIT,
    )
    events = [event async for event in stream]
    if not events or not isinstance(events[0], Started):
        raise BenchError(f"{asked.label}: the stream began without a session")
    return events[0].session_id, run_of(events, began_ns, time.monotonic_ns(), tokens, asked.label, asked.drafting)


async def together(asked: Asked, prompts: Sequence[Sequence[int]], tokens: int) -> Together:
    """All sessions at once. They are deleted then: no later run of a prompt is to start from what is kept of them."""
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(generate(asked, prompt, tokens)) for prompt in prompts]
    seconds = time.monotonic() - began
    found = [task.result() for task in tasks]
    async with asyncio.TaskGroup() as group:
        for session_id, _ in found:
            group.create_task(asked.client.delete_session(session_id, timeout=RUN_LIMIT))
    return Together(seconds, tuple(run for _, run in found))


def run_in(runner: asyncio.Runner, label: str, sessions: Coroutine[Any, Any, T]) -> T:
    """What the sessions yield; BenchError with the first failure among them."""
    try:
        return runner.run(sessions)
    except* (SpecwireError, BenchError) as errors:
        failure = _first(errors)
    raise BenchError(f"{label}: {failure}")


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def client_of(runner: asyncio.Runner, cleanup: ExitStack, address: str, token: str = "") -> AsyncClient:
    async def made() -> AsyncClient:
        return AsyncClient(address, token=token)

    client = runner.run(made())
    cleanup.callback(lambda: runner.run(client.close()))
    return client
