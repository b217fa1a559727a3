"""`--deterministic` through real services: a text is the same alone, in company, drafted for, and taken over midway."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from specwire.client import Chunk, Finished
from specwire.client.requests import RequestOptions
from tests.lm.models import near_ties, save
from tests.orchestrator.stack import Stack, stack
from tests.wait import asked

SESSIONS, SLOTS, TOKENS, VOCABULARY, CONTEXT = 8, 6, 100, 400, 160
# Tokens of the first text after which its verifier is replaced. Far from the end, for a verifier decides ahead.
MIDWAY = 12
WORDS = {f"w{index}": index for index in range(VOCABULARY)}
# Greedy, and coupled with and without filters.
DRAWN: list[RequestOptions] = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 0.7, "top_k": 20},
]
PLAIN: RequestOptions = {"drafting": False, "ngram": False}


@dataclass
class Written:
    """steps: numbers of the steps that decided the chunks, in order; each verifier counts its own."""

    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    accepted: int = 0

    @property
    def taken_over(self) -> bool:
        return self.steps != sorted(self.steps)


async def nothing() -> None:
    pass


async def alone(running: Stack) -> list[Written]:
    return [await write(running, index, PLAIN) for index in range(SESSIONS)]


async def together(running: Stack, midway: Callable[[], Awaitable[None]] = nothing) -> list[Written]:
    """midway: called once, when so much of the first text has come."""
    calls = [midway, *[nothing] * (SESSIONS - 1)]
    return await asyncio.gather(*(write(running, index, {}, call) for index, call in enumerate(calls)))


async def write(
    running: Stack, index: int, how: RequestOptions, midway: Callable[[], Awaitable[None]] = nothing
) -> Written:
    choice = random.Random(index)
    prompt = tuple(choice.randrange(VOCABULARY) for _ in range(choice.randint(2, 24)))
    wish: RequestOptions = {**DRAWN[index % len(DRAWN)], **how, "seed": index, "max_tokens": TOKENS, "ignore_eos": True}
    written = Written()
    async for event in running.client.generate(prompt, timeout=60.0, **wish):
        before = len(written.tokens)
        if isinstance(event, Chunk):
            assert event.timings is not None
            written.tokens += event.tokens
            written.steps.append(event.timings.step.number)
        if isinstance(event, Finished):
            written.accepted = event.stats.accepted
        if before < MIDWAY <= len(written.tokens):
            await midway()
    return written


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_texts_are_the_same_alone_together_and_after_a_takeover(dtype: str, tmp_path: Path) -> None:
    """Drafted for by the same weights in float32; the second verifier knows of the texts from the log."""
    target = save(near_ties(VOCABULARY, CONTEXT), tmp_path, WORDS)

    async def replace_verifier() -> None:
        await running.verify_again(target, patient=True, dtype=dtype, slots=SLOTS, deterministic=True)

    async with stack(
        target, target, plan="lockstep:3", patient=True, slots=SLOTS, dtype=dtype, deterministic=True
    ) as running:
        lone = await alone(running)
        shared = await asked(lambda: together(running), lambda way: sum(each.accepted for each in way))
        moved = await together(running, replace_verifier)
    texts = [each.tokens for each in lone]
    assert [len(text) for text in texts] == [TOKENS] * SESSIONS
    assert [each.tokens for each in shared] == texts
    assert [each.tokens for each in moved] == texts
    assert sum(each.accepted for each in lone) == 0
    assert [any(each.taken_over for each in way) for way in (lone, shared, moved)] == [False, False, True]
