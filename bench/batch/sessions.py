"""Sessions of ours through gRPC, in one event loop: begun together, or one after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.harness.rows import RUN_LIMIT, run_of
from bench.harness.runs import BenchError, Run
from specwire.client import AsyncClient, Started


@dataclass(frozen=True, slots=True)
class Asked:
    """How sessions are asked for: the address, what may propose, and how tokens are drawn.

    ngram: None goes by `drafting`, as in `specwire.client.requests.GenerationOptions`.
    """

    client: AsyncClient
    label: str
    drafting: bool
    temperature: float = 0.0
    seed: int | None = None
    ngram: bool | None = None


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
        ngram=asked.ngram,
        temperature=asked.temperature,
        seed=asked.seed,
        timeout=RUN_LIMIT,
    )
    events = [event async for event in stream]
    if not events or not isinstance(events[0], Started):
        raise BenchError(f"{asked.label}: the stream began without a session")
    return events[0].session_id, run_of(events, began_ns, time.monotonic_ns(), tokens, asked.label, asked.drafting)


async def together(asked: Asked, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, list[Run]]:
    """All sessions at once; seconds until the last one has ended, and their runs."""
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(generate(asked, prompt, tokens)) for prompt in prompts]
    seconds = time.monotonic() - began
    found = [task.result() for task in tasks]
    await forget(asked.client, [session_id for session_id, _ in found])
    return seconds, [run for _, run in found]


async def forget(client: AsyncClient, session_ids: Sequence[str]) -> None:
    """Delete them, so that the verifier keeps no keys and values that a later run of the prompt would start from."""
    async with asyncio.TaskGroup() as group:
        for session_id in session_ids:
            group.create_task(client.delete_session(session_id, timeout=RUN_LIMIT))
