"""What an orchestrator waits for at its start, and what it does not."""

from __future__ import annotations

import asyncio

import pytest

import orchestrator.server
import verify_service.server
from orchestrator import pool as pool_module
from orchestrator.options import OrchestratorOptions
from orchestrator.pool import Pool, StartError
from specwire.client import AsyncClient
from specwire.rpc.server_options import ModelServiceOptions
from tests.orchestrator.stack import PROMPT, SLOW_TARGET, plain, stack
from tests.ports import free_address
from tests.wait import asked, limits

OTHER = "scripted:8"


def pool(options: OrchestratorOptions) -> Pool:
    return Pool(options, list)


async def written(by: orchestrator.server.RunningOrchestrator, model: str = "") -> list[int]:
    """A short text; it is stopped then."""
    try:
        async with AsyncClient(by.address) as client:
            return list((await client.complete(PROMPT, model=model, max_tokens=20, ignore_eos=True)).tokens)
    finally:
        await by.stop(0.0)


async def test_a_verifier_that_is_refused_leaves_another_to_be_waited_for() -> None:
    known = pool(OrchestratorOptions(("a:1", "b:1")))
    known.verifiers[0].refusal = "serves other weights"
    ready = asyncio.create_task(known.until_ready())
    await asyncio.sleep(0)
    assert not ready.done()
    known.verifiers[1].link.distrusted = True
    known.verifiers[1].link.trouble = "b:1 is not trusted"
    known.verifiers[1].on_unreachable()
    with pytest.raises(StartError, match="a:1: serves other weights"):
        async with asyncio.timeout(60.0):
            await ready


async def test_a_drafter_that_is_refused_is_not_waited_for() -> None:
    known = pool(OrchestratorOptions(("a:1",), ("c:1",)))
    known.drafters[0].refusal = "vocabulary mismatch"
    with pytest.raises(StartError, match="c:1: vocabulary mismatch"):
        async with asyncio.timeout(60.0):
            await known.until_ready()


@pytest.mark.parametrize(("moment_s", "start_timeout"), [(0.2, 120.0), (10.0, 0.5)])
async def test_a_drafter_that_is_not_there_is_waited_for_but_a_moment(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dead_address: str,
    moment_s: float,
    start_timeout: float,
) -> None:
    monkeypatch.setattr(pool_module, "OTHERS_WITHIN_S", moment_s)
    async with stack(SLOW_TARGET) as running:
        verifiers = running.orchestrator.orchestrator.options.verifiers
        waits = limits(start_timeout)

        async def start() -> orchestrator.server.RunningOrchestrator | None:
            try:
                options = OrchestratorOptions(verifiers, (dead_address,), start_timeout=next(waits))
                return await orchestrator.server.start(options)
            except StartError:  # a busy machine's verifier was not there in time
                return None

        started = await asked(start, lambda answer: answer)
        assert started is not None
        assert await written(started) == plain(SLOW_TARGET, PROMPT, 20)
    (told,) = (each for each in caplog.messages if each.startswith("until drafters come, sessions run plainly: "))
    assert dead_address in told


async def test_a_request_right_after_the_start_finds_every_verifier_that_was_named() -> None:
    late = free_address()
    async with stack(SLOW_TARGET) as running:
        verifiers = (*running.orchestrator.orchestrator.options.verifiers, late)
        starting = asyncio.create_task(orchestrator.server.start(OrchestratorOptions(verifiers)))
        await asyncio.sleep(
            0.5
        )  # the first is known by then, unless the machine is busy, where it may as well be later
        verifier = await verify_service.server.start(ModelServiceOptions(OTHER, late))
        started = await starting
        assert await written(started, OTHER) == plain(OTHER, PROMPT, 20)
        await verifier.stop(0.0)


async def test_a_verifier_that_is_not_there_is_waited_for_but_a_moment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dead_address: str
) -> None:
    monkeypatch.setattr(pool_module, "OTHERS_WITHIN_S", 0.2)
    async with stack(SLOW_TARGET) as running:
        verifiers = (dead_address, *running.orchestrator.orchestrator.options.verifiers)
        started = await orchestrator.server.start(OrchestratorOptions(verifiers))
        assert await written(started) == plain(SLOW_TARGET, PROMPT, 20)
    (told,) = (
        each for each in caplog.messages if each.startswith("models of verifiers that are not there are refused: ")
    )
    assert dead_address in told
