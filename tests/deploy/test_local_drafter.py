"""The drafter in the orchestrator's process: its proposals count, its end costs speed only, its refusals are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import draft_service.server
from deploy.cli.services.edge import LocalDrafter
from orchestrator.pool import StartError
from specwire.rpc.server_options import ModelServiceOptions
from specwire.v1 import draft_pb2
from tests.orchestrator.stack import DRAFT, PROMPT, SLOW_TARGET, Stack, plain, stack
from tests.wait import until

LIMIT_S = 120.0
LENGTH = 60


@asynccontextmanager
async def local(running: Stack, model: str = DRAFT) -> AsyncIterator[LocalDrafter]:
    drafter = LocalDrafter(*(await draft_service.server.load(ModelServiceOptions(model, slots=4)))[:2])
    try:
        drafter.join(running.orchestrator.orchestrator)
        yield drafter
    finally:
        await drafter.stop()
        assert running.orchestrator.orchestrator.pool.drafters == []


async def test_another_vocabulary_is_refused() -> None:
    async with stack(SLOW_TARGET) as running:
        with pytest.raises(StartError, match="vocabulary mismatch"):
            async with local(running, "scripted:7:vocab=65"):
                pass


@pytest.mark.parametrize("end", ["stopped", "it misbehaves", "the drafter failed: OSError: gone"])
async def test_sessions_go_on_without_it(
    end: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped, cut off, or broken: drafting ends, and nothing else."""

    async def failed() -> str:
        return end

    async with stack(SLOW_TARGET) as running, local(running) as drafter:
        text = asyncio.create_task(running.client.complete(PROMPT, max_tokens=LENGTH, ignore_eos=True))
        await asyncio.sleep(0.1)
        if end == "stopped":
            await drafter.stop()
        elif end == "it misbehaves":
            drafter.cut(end)
        else:
            monkeypatch.setattr(drafter._drafter, "failed", failed)
            await asyncio.wait_for(drafter._watch(), LIMIT_S)
        done = await asyncio.wait_for(text, LIMIT_S)
        assert list(done.tokens) == plain(SLOW_TARGET, PROMPT, LENGTH)
        assert not drafter.up
    assert (f"specwire edge: drafting has ended: {end}" in capsys.readouterr().err) == (end != "stopped")


async def test_a_message_that_is_wrong_is_answered_later_not_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal in the middle of a session's event would find the session half-way."""
    async with stack(SLOW_TARGET) as running, local(running) as drafter:
        heard: list[draft_pb2.ConnectDraftResponse] = []
        monkeypatch.setattr(drafter._peer, "on_message", heard.append)
        wrong = draft_pb2.Advance(handle=9, position=0, pace=draft_pb2.Pace(chunk=1))
        drafter.send(draft_pb2.ConnectDraftRequest(advances=[wrong]))
        assert heard == []
        await until(lambda: heard)
        assert [refused.code for message in heard for refused in message.refused] == [3]
