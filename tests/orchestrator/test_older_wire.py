"""Peers of an older release beside those of today: the text is the target's, and drafting still takes part in it."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

import draft_service.server
import verify_service.server
from orchestrator import server
from orchestrator.options import OrchestratorOptions
from specwire.client import AsyncClient, Completion, SpecwireError
from specwire.rpc.server_options import ModelServiceOptions
from tests.orchestrator.stack import DRAFT, PROMPT, SLOW_TARGET, TARGET, TURNS, drafted, plain
from tests.rpc.older_wire import older_wire

VERIFIER, DRAFTER, CLIENT = "a verifier", "a drafter", "a client"


@pytest.mark.parametrize("older", [(VERIFIER,), (DRAFTER,), (CLIENT,), (VERIFIER, DRAFTER, CLIENT)], ids=" and ".join)
async def test_one_side_is_older(older: tuple[str, ...]) -> None:
    """An edge (orchestrator, drafter, client) is older than its verifier in the last case, as it speaks."""
    wires = {}
    async with AsyncExitStack() as parts:

        async def reached(who: str, address: str) -> str:
            if who not in older:
                return address
            its, wire = await parts.enter_async_context(older_wire(address))
            wires[who] = wire
            return its

        verifier = await verify_service.server.start(ModelServiceOptions(SLOW_TARGET, slots=4), patient=True)
        parts.push_async_callback(verifier.stop, 0.0)
        drafter = await draft_service.server.start(ModelServiceOptions(DRAFT))
        parts.push_async_callback(drafter.stop, 0.0)
        peers = (await reached(VERIFIER, verifier.address),), (await reached(DRAFTER, drafter.address),)
        orchestrator = await server.start(OrchestratorOptions(*peers, "memory:", plan=TURNS))
        parts.push_async_callback(orchestrator.stop, 0.0)
        client = AsyncClient(await reached(CLIENT, orchestrator.address))
        await parts.enter_async_context(client)

        async def text() -> Completion:
            return await client.complete(list(PROMPT), max_tokens=48)

        assert list((await drafted(text)).tokens) == plain(TARGET, PROMPT, 48)
        if CLIENT in older:
            with pytest.raises(SpecwireError, match="UNIMPLEMENTED"):
                await client.score_text(list(PROMPT), [[[1, 2]]])
    assert all(wire.passed > 0 for wire in wires.values())
    # A drafter that is asked for chains is told nothing new.
    assert all(wire.dropped > 0 for who, wire in wires.items() if who != DRAFTER)
