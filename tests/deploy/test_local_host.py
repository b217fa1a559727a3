"""A whole stack in one process: models in threads, no socket between them and the orchestrator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest

from deploy.stack import stack
from deploy.stack.hosts import CorePlan, threads_told
from deploy.stack.options import StackError, StackOptions
from specwire.client import AsyncClient, Chunk, SpecwireError, Started
from specwire.core.messages import FinishReason
from specwire.rpc.model_info import core_numbers
from tests.orchestrator.stack import PROMPT, plain
from tests.ports import free_address
from tests.wait import LIMIT_S, until
from verify_service.engine.engine import Engine

TARGET, DRAFT = "scripted:7:vocab=64", "scripted:7:vocab=64:agree=0.7"
SLOW = f"{TARGET}:delay_ms=8"
THREADS = ("verifier", "drafter")


@asynccontextmanager
async def running(folder: Path, target: str = TARGET, draft: str | None = DRAFT, **more: Any) -> AsyncIterator[Any]:
    """The stack and a client; nothing of it is left behind."""
    options = StackOptions(target, draft, one_process=True, **more)
    said: list[str] = []
    before = set(threading.enumerate())  # another test's may still be ending
    parts = await stack.start(options, folder, said.append)
    try:
        async with AsyncClient(parts.address) as client:
            yield parts, client
    finally:
        await parts.stop()

    await until(lambda: not begun_since(before))  # one that failed is about to end
    assert {f"{role}: ready" for role in parts.services} <= set(said)


def begun_since(before: set[threading.Thread]) -> list[str]:
    """The names of a stack's threads that live and did not then."""
    alive = set(threading.enumerate()) - before
    return [each.name for each in alive if each.name.startswith((*THREADS, "session-log"))]


async def test_cancel_and_deadline_end_a_text(tmp_path: Path) -> None:
    async with running(tmp_path, SLOW) as (_, client):
        async with aclosing(client.generate(PROMPT, max_tokens=4000, ignore_eos=True)) as events:
            started = await anext(events)
            assert isinstance(started, Started)
            assert isinstance(await anext(events), Chunk)

        async def cancelled() -> bool:
            told = await client.get_session(started.session_id)
            return told.finish_reason is FinishReason.CANCELLED

        await until(cancelled)
        await check_late(client, 0.5)
        done = await client.complete(PROMPT, max_tokens=20, ignore_eos=True)
        assert (list(done.tokens), done.finish_reason) == (plain(TARGET, PROMPT, 20), FinishReason.LENGTH)


async def test_a_model_that_fails_ends_it_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started again: its process cannot go on."""
    async with running(tmp_path) as (parts, client):
        failing = asyncio.create_task(parts.failed())
        monkeypatch.setattr(Engine, "step", broken)
        await check_late(client, 5.0)
        async with asyncio.timeout(LIMIT_S):
            assert await failing == "the verifier failed: RuntimeError: broken"


async def check_late(client: AsyncClient, timeout: float) -> None:
    """Whoever is the first to see it tells of it, client or orchestrator."""
    late: Any = None
    try:
        late = (await client.complete(PROMPT, max_tokens=4000, ignore_eos=True, timeout=timeout)).finish_reason
    except SpecwireError as error:
        late = error.code
    assert late in (FinishReason.DEADLINE, grpc.StatusCode.DEADLINE_EXCEEDED)


def broken(*_: object) -> None:
    raise RuntimeError("broken")


async def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    options = StackOptions("scripted:7", "scripted:7:agree=2", one_process=True)
    before = set(threading.enumerate())  # another test's may still be ending
    with pytest.raises(StackError, match="drafter: agree: must be from 0 to 1, not 2.0"):
        await stack.start(options, tmp_path, lambda _: None)
    await until(lambda: not begun_since(before))


def test_the_verifier_has_cores_of_its_own_where_one_is_left() -> None:
    one = StackOptions(TARGET, DRAFT, one_process=True)
    assert str(CorePlan.of([0, 1], one.services())) == "the verifier computes on core 1, all else runs on core 0"
    wide = replace(one, target_threads=2)
    placed = CorePlan.of([2, 3, 5, 7], wide.services())
    assert (placed.cores_of("verifier"), placed.cores_of("drafter-2")) == (frozenset({5, 7}), frozenset({2, 3}))
    shared = (wide, replace(one, also=("scripted:8",)), replace(one, device="cuda:0"))
    assert {str(CorePlan.of([0, 1], each.services())) for each in shared} == {"all threads share all cores"}
    assert CorePlan.of([], one.services()) == CorePlan()
    told = "verifier, 2 threads; drafter, 1 thread: all threads share all cores"
    assert threads_told(wide.services(), CorePlan()) == told


async def test_where_its_threads_run_is_told_and_is_over_with_it(tmp_path: Path) -> None:
    before, said = core_numbers(), list[str]()
    options = StackOptions(TARGET, DRAFT, one_process=True)
    parts = await stack.start(options, tmp_path, said.append)
    placed = CorePlan.of(before, options.services())
    try:
        assert f"verifier, 1 thread; drafter, 1 thread: {placed}" in said
        assert core_numbers() == (sorted(placed.others) or before)
    finally:
        await parts.stop()
    assert core_numbers() == before


async def test_figures_are_told_together(tmp_path: Path) -> None:
    at = free_address()
    async with running(tmp_path, "scripted:7", "scripted:7", metrics=at, also=("scripted:8",)) as (_, client):
        await client.complete(PROMPT, max_tokens=4, model="scripted:7")
        async with httpx.AsyncClient(base_url=f"http://{at}", timeout=LIMIT_S) as http:
            text = (await http.get("/metrics")).text
        for service in ("orchestrator", "verifier", "verifier-2", "drafter"):
            assert f'service="{service}"' in text
