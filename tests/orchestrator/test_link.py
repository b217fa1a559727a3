"""A link outlives what its listener does, and asks for a tokenizer once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import grpc
import grpc.aio
import pytest

import verify_service.server
from orchestrator.peers import VerifierPeer
from specwire.rpc.process import ModelServiceOptions
from specwire.v1 import common_pb2, verify_pb2
from tests.orchestrator.stack import PROMPT, SLOW_TARGET, plain, stack


async def test_a_listener_that_fails_costs_a_connection_not_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stack(SLOW_TARGET) as running:
        peer = running.orchestrator.orchestrator.verifiers[0]
        failures = iter([RuntimeError("a bug")])

        def fail_once(message: verify_pb2.ConnectVerifyResponse) -> None:
            for failure in failures:
                raise failure
            VerifierPeer.on_message(peer, message)

        monkeypatch.setattr(peer, "on_message", fail_once)
        async with asyncio.timeout(10):
            done = await running.client.complete(PROMPT, max_tokens=20, ignore_eos=True)
    assert list(done.tokens) == plain(SLOW_TARGET, PROMPT, 20)


async def test_a_known_tokenizer_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stack(SLOW_TARGET) as running:
        peer = running.orchestrator.orchestrator.verifiers[0]
        assert peer.info is not None
        first, describe = peer.info, peer.link._describe
        asked: list[str] = []

        def ask(
            channel: grpc.aio.Channel, request: common_pb2.GetModelInfoRequest
        ) -> Awaitable[common_pb2.GetModelInfoResponse]:
            asked.append(request.known_tokenizer_hash)
            return describe(channel, request)

        monkeypatch.setattr(peer.link, "_describe", ask)
        await running.verifier.stop(0.0)
        again = await verify_service.server.start(ModelServiceOptions(SLOW_TARGET, listen=running.verifier.address))
        try:
            for _ in range(500):
                if peer.info is not first:
                    break
                await asyncio.sleep(0.02)
        finally:
            await again.stop(0.0)
    assert set(asked) == {first.tokenizer_hash}
    assert peer.info is not first
    assert peer.info.tokenizer_json == first.tokenizer_json != b""
