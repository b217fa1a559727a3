"""Provisional text: shown at once, marked, and without any influence on what is decided."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from specwire.client import Chunk, Event, Finished, Provisional, Started
from specwire.client.requests import RequestOptions
from specwire.core.messages import off
from specwire.core.policy.drafters import DrafterPacing
from tests.orchestrator.stack import PROMPT, TARGET, Stack, plain, stack
from tests.wait import asked

SLOW = f"{TARGET}:delay_ms=40"
DRAFT = "scripted:7:vocab=64:agree=0.6"
LENGTH = 40
OFF = off("no gain")


async def events(running: Stack, *, provisional: bool, stop: tuple[str, ...] = ()) -> list[Event]:
    asked = running.client.generate(
        PROMPT, max_tokens=LENGTH, ignore_eos=True, stop=stop, provisional=provisional, timeout=60.0
    )
    async with aclosing(asked) as stream:
        return [event async for event in stream]


def decided(seen: list[Event]) -> tuple[list[int], str]:
    tokens = [token for event in seen if isinstance(event, Chunk) for token in event.tokens]
    return tokens, "".join(event.text for event in seen if isinstance(event, Chunk | Finished))


def shown_in(seen: list[Event]) -> bool:
    return any(isinstance(event, Provisional) and event.tokens for event in seen)


async def test_drafts_are_shown_behind_the_decided_text_and_change_nothing() -> None:
    async with stack(SLOW, DRAFT) as running:
        seen = await asked(lambda: events(running, provisional=True), shown_in)
        without = await events(running, provisional=False)
    assert decided(seen) == decided(without)
    assert decided(seen)[0] == plain(TARGET, PROMPT, LENGTH)
    assert not shown_in(without)
    end, text = len(PROMPT), ""
    for event in seen:
        if isinstance(event, Chunk):
            end, text = event.position + len(event.tokens), text + event.text
        elif isinstance(event, Provisional) and event.tokens:
            assert event.position == end
            words = " ".join(map(str, event.tokens))
            assert event.text == (f" {words}" if text else words)
            assert end + len(event.tokens) <= len(PROMPT) + LENGTH


@pytest.mark.parametrize(("device", "shown"), [("elsewhere", True), ("cpu", False)])
async def test_where_no_gain_is_expected_a_drafter_is_shown_if_it_takes_no_time_from_the_verifier(
    device: str, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DrafterPacing, "_first", lambda _: OFF)
    monkeypatch.setattr(DrafterPacing, "_planned", lambda *_: OFF)
    async with stack(f"{TARGET}:delay_ms=20:device={device}", DRAFT) as running:
        # What is decided and not durable yet is provisional, too: that something is shown does not say who proposed it.
        seen = await asked(lambda: events(running, provisional=True), lambda told: shown_in(told) or not shown)
        without = await events(running, provisional=False)
    assert isinstance(seen[-1], Finished)
    assert [each.plan for each in seen[-1].stats.drafters] == ["off: no gain"]
    assert decided(seen) == decided(without)
    assert decided(seen)[0] == plain(TARGET, PROMPT, LENGTH)


async def test_without_drafting_nothing_is_provisional() -> None:
    async with stack(SLOW, DRAFT) as running:
        asked = running.client.generate(PROMPT, max_tokens=10, drafting=False, provisional=True, timeout=60.0)
        async with aclosing(asked) as stream:
            assert not [event async for event in stream if isinstance(event, Provisional)]


async def test_a_watcher_and_a_reader_that_joins_late_get_the_same_text() -> None:
    """The watcher is shown nothing provisional, the one who joins with the request id is."""
    names = itertools.count()

    async def read(running: Stack) -> tuple[list[Event], list[Event], list[Event]]:
        options = RequestOptions(max_tokens=LENGTH, ignore_eos=True, request_id=str(next(names)))
        shown: RequestOptions = {**options, "provisional": True}
        first = running.client.generate(PROMPT, **options)
        async with aclosing(first) as stream:
            started = await anext(stream)
            assert isinstance(started, Started)
            await anext(stream)
            return await asyncio.gather(
                everything(running.client.watch(started.session_id, timeout=60.0)),
                everything(running.client.generate(PROMPT, **shown)),
                everything(stream),
            )

    async with stack(SLOW, DRAFT) as running:
        watched, joined, rest = await asked(lambda: read(running), lambda told: shown_in(told[1]))
    assert not shown_in([*watched, *rest])
    assert decided(watched) == decided(joined)
    assert decided(joined)[0] == plain(TARGET, PROMPT, LENGTH)


async def everything(stream: AsyncGenerator[Event, None]) -> list[Event]:
    async with aclosing(stream) as events:
        return [event async for event in events]
