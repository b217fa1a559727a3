"""Provisional text: shown at once, marked, and without any influence on what is decided."""

from __future__ import annotations

from contextlib import aclosing

from specwire.client import Chunk, Event, Finished, Provisional
from tests.orchestrator.stack import PROMPT, TARGET, Stack, plain, stack

SLOW = f"{TARGET}:delay_ms=40"
DRAFT = "scripted:7:vocab=64:agree=0.6"
LENGTH = 40


async def events(running: Stack, *, provisional: bool, stop: tuple[str, ...] = ()) -> list[Event]:
    asked = running.client.generate(
        PROMPT, max_tokens=LENGTH, ignore_eos=True, stop=stop, provisional=provisional, timeout=60.0
    )
    async with aclosing(asked) as stream:
        return [event async for event in stream]


def decided(seen: list[Event]) -> tuple[list[int], str]:
    tokens = [token for event in seen if isinstance(event, Chunk) for token in event.tokens]
    return tokens, "".join(event.text for event in seen if isinstance(event, Chunk | Finished))


async def test_drafts_are_shown_behind_the_decided_text_and_change_nothing() -> None:
    async with stack(SLOW, DRAFT) as running:
        seen = await events(running, provisional=True)
        without = await events(running, provisional=False)
    assert decided(seen) == decided(without)
    assert decided(seen)[0] == plain(TARGET, PROMPT, LENGTH)
    assert not any(isinstance(event, Provisional) for event in without)
    end, text, shown = len(PROMPT), "", 0
    for event in seen:
        if isinstance(event, Chunk):
            end, text = event.position + len(event.tokens), text + event.text
        elif isinstance(event, Provisional) and event.tokens:
            assert event.position == end
            words = " ".join(map(str, event.tokens))
            assert event.text == (f" {words}" if text else words)
            assert end + len(event.tokens) <= len(PROMPT) + LENGTH
            shown += 1
    assert shown
