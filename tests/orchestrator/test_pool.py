"""What an orchestrator waits for at its start, and what it does not."""

from __future__ import annotations

import asyncio

import pytest

import orchestrator.server
from orchestrator import pool as pool_module
from orchestrator.options import OrchestratorOptions
from orchestrator.pool import Pool, StartError
from specwire.client import AsyncClient
from tests.orchestrator.stack import PROMPT, SLOW_TARGET, plain, stack


def pool(options: OrchestratorOptions) -> Pool:
    return Pool(options, list)


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
    monkeypatch.setattr(pool_module, "DRAFTERS_WITHIN_S", moment_s)
    async with stack(SLOW_TARGET) as running:
        verifiers = running.orchestrator.orchestrator.options.verifiers
        started = await orchestrator.server.start(
            OrchestratorOptions(verifiers, (dead_address,), start_timeout=start_timeout)
        )
        try:
            async with AsyncClient(started.address) as client:
                done = await client.complete(PROMPT, max_tokens=20, ignore_eos=True)
        finally:
            await started.stop(0.0)
    assert list(done.tokens) == plain(SLOW_TARGET, PROMPT, 20)
    assert f"until drafters come, sessions run plainly: cannot connect to {dead_address}" in caplog.text
