"""What an orchestrator waits for at its start, and what it does not."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.options import OrchestratorOptions
from orchestrator.pool import Pool, StartError


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
        async with asyncio.timeout(5.0):
            await ready


async def test_a_drafter_that_is_refused_is_not_waited_for() -> None:
    known = pool(OrchestratorOptions(("a:1",), ("c:1",)))
    known.drafters[0].refusal = "vocabulary mismatch"
    with pytest.raises(StartError, match="c:1: vocabulary mismatch"):
        async with asyncio.timeout(5.0):
            await known.until_ready()
