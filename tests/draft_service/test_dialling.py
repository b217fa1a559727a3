"""A drafter that dials in and is given up: nothing of it goes on."""

from __future__ import annotations

import asyncio

from draft_service.dialler import DiallingDrafter
from draft_service.server import load
from specwire.rpc.server_options import ModelServiceOptions

TURNS = 5


async def test_who_waits_for_it_may_give_up(dead_address: str) -> None:
    running = DiallingDrafter(await load(ModelServiceOptions("scripted:7")), dead_address, None)
    waiting = [asyncio.create_task(running.join()), asyncio.create_task(running.failed())]
    for _ in range(TURNS):  # of the event loop: both wait by then
        await asyncio.sleep(0)
    for wait in waiting:
        wait.cancel()
    await asyncio.wait(waiting, timeout=120.0)
    assert all(wait.cancelled() for wait in waiting)
    async with asyncio.timeout(60.0):
        await running.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}
