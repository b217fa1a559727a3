"""Drafters that dial in show a token of their own, and may not send messages of any size."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

import draft_service.server
from draft_service.dialler import JoinRefused
from orchestrator.hub import MOST_SAID_BYTES
from orchestrator.server import RunningOrchestrator
from orchestrator.tenants import Access
from specwire.client import AsyncClient
from specwire.rpc.channel import open_channel
from specwire.rpc.keys import Keys
from specwire.rpc.server_options import ModelServiceOptions
from specwire.v1 import draft_pb2, draft_pb2_grpc
from tests.orchestrator.stack import DRAFT, PROMPT, SLOW_TARGET, TURNS, drafted, plain, stack

CLIENT, DRAFTER = "the-token-of-a-client", "the-token-of-a-drafter"
ACCESS = Access(Keys({CLIENT: "ada"}), Keys({DRAFTER: "attic"}))
LIMIT_S = 120.0


@asynccontextmanager
async def hub() -> AsyncIterator[RunningOrchestrator]:
    async with stack(SLOW_TARGET, patient=True) as running:
        yield await running.another(accept_drafters=True, access=ACCESS, plan=TURNS)


async def test_a_drafter_with_its_token_joins_and_a_client_with_its_own_is_served() -> None:
    async with hub() as running:
        drafter = await draft_service.server.dial_in(ModelServiceOptions(DRAFT), running.address, None, DRAFTER)
        try:
            async with AsyncClient(running.address, token=CLIENT) as client:
                done = await drafted(
                    lambda: client.complete(PROMPT, max_tokens=60, ignore_eos=True, timeout=LIMIT_S), least=11
                )
        finally:
            await drafter.stop()
    assert list(done.tokens) == plain(SLOW_TARGET, PROMPT, 60)


@pytest.mark.parametrize("token", ["", CLIENT, "a-token-of-nobody"])
async def test_no_other_token_lets_a_drafter_in(token: str) -> None:
    async with hub() as running:
        with pytest.raises(JoinRefused, match="refused this drafter: authorization: "):
            await draft_service.server.dial_in(ModelServiceOptions(DRAFT), running.address, None, token)
        assert running.orchestrator.pool.drafters == []


async def test_a_message_beyond_the_cap_ends_the_line_and_bars_its_owner() -> None:
    async with hub() as running, open_channel(running.address, token=DRAFTER) as channel:
        stub = draft_pb2_grpc.DraftHubServiceStub(channel)
        call = stub.Join(timeout=LIMIT_S)
        target = running.orchestrator.pool.require_target().info
        told = draft_pb2.JoinRequest()
        told.model.vocabulary_fingerprint = target.vocabulary_fingerprint
        await call.write(told)
        await call.read()
        said = draft_pb2.JoinRequest()
        said.said.proposals.add(tokens=[1] * MOST_SAID_BYTES)
        await call.write(said)
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"at most {MOST_SAID_BYTES} are taken" in (await call.details() or "")
        again = stub.Join(timeout=LIMIT_S)
        assert await again.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "attic flooded; it is let in again in" in (await again.details() or "")
        assert running.orchestrator.pool.drafters == []
