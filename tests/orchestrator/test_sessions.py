"""What an orchestrator waits for at its start, and what it does not."""

from __future__ import annotations

import asyncio
import gc

import grpc
import pytest

from orchestrator.driver import SessionDriver
from orchestrator.options import OrchestratorOptions
from orchestrator.sessions import Orchestrator, StartError
from orchestrator.store.memory import MemoryStore
from specwire.rpc.errors import StatusError


async def test_a_verifier_that_is_refused_leaves_another_to_be_waited_for() -> None:
    known = Orchestrator(OrchestratorOptions(("a:1", "b:1")), MemoryStore())
    known.verifiers[0].refusal = "serves other weights"
    ready = asyncio.create_task(known._until_ready())
    await asyncio.sleep(0)
    assert not ready.done()
    known.verifiers[1].link.distrusted = True
    known.verifiers[1].link.trouble = "b:1 is not trusted"
    known.verifiers[1].on_unreachable()
    with pytest.raises(StartError, match="a:1: serves other weights"):
        await asyncio.wait_for(ready, 5.0)


async def test_a_drafter_that_is_refused_is_not_waited_for() -> None:
    known = Orchestrator(OrchestratorOptions(("a:1",), ("c:1",)), MemoryStore())
    known.drafters[0].refusal = "vocabulary mismatch"
    with pytest.raises(StartError, match="c:1: vocabulary mismatch"):
        await asyncio.wait_for(known._until_ready(), 5.0)


async def test_a_failure_to_begin_that_nobody_waits_for_is_no_unhandled_error() -> None:
    known, answer = Orchestrator(OrchestratorOptions(("a:1",)), MemoryStore()), asyncio.Event()
    unhandled: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))

    async def fail() -> SessionDriver:
        await answer.wait()
        raise StatusError(grpc.StatusCode.UNAVAILABLE, "the log does not answer")

    caller = asyncio.create_task(known._begin("session", fail()))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait({caller})
    answer.set()
    await asyncio.wait(known._opening.values())
    del caller
    gc.collect()
    assert unhandled == []
