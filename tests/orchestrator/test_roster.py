"""Sessions that are about to begin."""

from __future__ import annotations

import asyncio
import gc

import grpc

from orchestrator.session.driver import SessionDriver
from orchestrator.sessions import KnownSessions
from specwire.rpc.errors import StatusError


async def test_a_failure_to_begin_that_nobody_waits_for_is_no_unhandled_error() -> None:
    known, answer = KnownSessions(patience=10.0), asyncio.Event()
    unhandled: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))

    async def fail() -> SessionDriver:
        await answer.wait()
        raise StatusError(grpc.StatusCode.UNAVAILABLE, "the log does not answer")

    caller = asyncio.create_task(known.open("session", fail()))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait({caller})
    assert known.knows("session")
    answer.set()
    await asyncio.wait(known._opening.values())
    assert not known.knows("session")
    del caller
    gc.collect()
    assert unhandled == []
