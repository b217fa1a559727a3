"""Drafters that dial in: used like any other, refused with a reason, cut off where they flood, back after a loss."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

import draft_service.server
import orchestrator.server
from bench.harness.certificates import Authority
from draft_service.dialler import DiallingDrafter, JoinRefused
from orchestrator import hub as module
from orchestrator.hub import MOST_SAID_BYTES
from orchestrator.options import OrchestratorOptions
from orchestrator.peers.peer import share_host
from orchestrator.server import RunningOrchestrator
from orchestrator.tenants import Access
from specwire.client import Completion
from specwire.client.requests import RequestOptions
from specwire.rpc.channel import open_channel
from specwire.rpc.errors import retry_after
from specwire.rpc.keys import Keys
from specwire.rpc.link import QUARANTINE
from specwire.rpc.server_options import ModelServiceOptions
from specwire.rpc.tls import ClientTls
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from tests.orchestrator.stack import DRAFT, PROMPT, SLOW_TARGET, TURNS, Stack, drafted, plain, stack
from tests.wait import raised, until

LIMIT_S = 120.0
INFO = common_pb2.GetModelInfoResponse
Joining = grpc.aio.StreamStreamCall[draft_pb2.JoinRequest, draft_pb2.JoinResponse]


async def dial(
    address: str, tls: ClientTls | None = None, token: str = "", also: tuple[str, ...] = (), model: str = DRAFT
) -> DiallingDrafter:
    dialling = draft_service.server.dial_in(ModelServiceOptions(model), address, tls, token, also=also)
    return await asyncio.wait_for(dialling, LIMIT_S)


@asynccontextmanager
async def dialled(address: str, *shown: Any, **more: Any) -> AsyncIterator[DiallingDrafter]:
    drafter = await dial(address, *shown, **more)
    try:
        yield drafter
    finally:
        await drafter.stop()


def drafters_of(running: Stack) -> int:
    return sum(drafter.up for drafter in running.orchestrator.orchestrator.pool.drafters)


async def text_of(running: Stack) -> Completion:
    """A text that was drafted for."""
    wish = RequestOptions(max_tokens=60, ignore_eos=True)
    return await drafted(lambda: running.client.complete(PROMPT, timeout=LIMIT_S, **wish), least=11)


async def test_several_may_join_and_leave() -> None:
    async with stack(SLOW_TARGET, accept_drafters=True) as running:
        address = running.orchestrator.address
        async with dialled(address), dialled(address) as second:
            assert drafters_of(running) == 2
            text = asyncio.create_task(running.client.complete(PROMPT, max_tokens=60, ignore_eos=True))
            await asyncio.sleep(0.1)
            await second.stop()
            await until(lambda: len(running.orchestrator.orchestrator.pool.drafters) == 1)
            assert list((await asyncio.wait_for(text, LIMIT_S)).tokens) == plain(SLOW_TARGET, PROMPT, 60)
        await until(lambda: running.orchestrator.orchestrator.pool.drafters == [])


async def test_one_drafter_may_serve_several_orchestrators(
    capsys: pytest.CaptureFixture[str], dead_address: str
) -> None:
    """One of them refuses it, one is not there: the others are served all the same."""
    async with (
        stack(SLOW_TARGET, accept_drafters=True, plan=TURNS, patient=True) as first,
        stack(SLOW_TARGET, accept_drafters=True, plan=TURNS, patient=True) as second,
        stack(SLOW_TARGET) as strict,
    ):
        also = (second.orchestrator.address, strict.orchestrator.address, dead_address)
        async with dialled(first.orchestrator.address, also=also):
            await until(lambda: drafters_of(first) == drafters_of(second) == 1)
            for running in (first, second):
                assert list((await text_of(running)).tokens) == plain(SLOW_TARGET, PROMPT, 60)
        refusal = f"specwire draft: {strict.orchestrator.address} does not let drafters dial in (--accept-drafters)"
        assert refusal in capsys.readouterr().err.splitlines()


async def test_it_ends_once_none_of_several_will_have_it() -> None:
    async with stack(SLOW_TARGET) as one, stack(SLOW_TARGET) as other:
        with pytest.raises(JoinRefused, match="does not let drafters dial in"):
            await dial(one.orchestrator.address, also=(other.orchestrator.address,))


# A peer that does not keep to the protocol


@asynccontextmanager
async def joining(address: str) -> AsyncIterator[Joining]:
    async with open_channel(address) as channel:
        call = draft_pb2_grpc.DraftHubServiceStub(channel).Join(timeout=LIMIT_S)
        yield call
        call.cancel()


FLOOD = draft_pb2.JoinRequest(said={"proposals": [{"handle": 1, "tokens": [1] * 5000}]})


async def introduce(call: Joining, info: common_pb2.GetModelInfoResponse) -> None:
    """Join with this description."""
    await call.write(draft_pb2.JoinRequest(model=info))
    assert isinstance(await call.read(), draft_pb2.JoinResponse)


async def failure(call: Joining) -> grpc.aio.AioRpcError:
    """What the stream ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while isinstance(await call.read(), draft_pb2.JoinResponse):
            pass
    return caught.value


async def ending(call: Joining) -> tuple[str, str]:
    """The status that the stream ends with."""
    error = await failure(call)
    return error.code().name, error.details() or ""


async def fitting(running: Stack) -> common_pb2.GetModelInfoResponse:
    """A description that the orchestrator takes."""
    info = running.orchestrator.orchestrator.pool.require_target().info
    return INFO(model="raw", vocabulary=info.vocabulary, vocabulary_fingerprint=info.vocabulary_fingerprint)


async def test_a_hello_must_come_first_and_once() -> None:
    async with stack(SLOW_TARGET, accept_drafters=True) as running:
        address = running.orchestrator.address
        async with joining(address) as call:
            await call.write(draft_pb2.JoinRequest(said=draft_pb2.ConnectDraftResponse()))
            assert await ending(call) == ("INVALID_ARGUMENT", "model: must be in the first message")
        async with joining(address) as call:
            await call.done_writing()
            assert (await ending(call))[0] == "INVALID_ARGUMENT"
        async with joining(address) as call:
            await call.write(draft_pb2.JoinRequest(model=INFO(model="x" * 1025)))
            assert await ending(call) == (
                "INVALID_ARGUMENT",
                "model.model: has 1025 characters, at most 1024 are taken",
            )
        async with joining(address) as call:
            await introduce(call, await fitting(running))
            await call.write(draft_pb2.JoinRequest(model=await fitting(running)))
            assert await ending(call) == ("INVALID_ARGUMENT", "model: must be in the first message only")
        await until(lambda: running.orchestrator.orchestrator.pool.drafters == [])


async def test_of_a_description_only_what_is_needed_is_kept() -> None:
    async with stack(SLOW_TARGET, accept_drafters=True) as running, joining(running.orchestrator.address) as call:
        told = await fitting(running)
        told.eos_ids.extend([1] * 100_000)
        told.tokenizer_json = told.chat_template.encode() + b"x" * 100_000
        await introduce(call, told)
        kept = running.orchestrator.orchestrator.pool.drafters[0].info
        assert kept == await fitting(running)


async def test_one_that_floods_is_cut_off_and_not_let_in_again() -> None:
    async with stack(SLOW_TARGET, accept_drafters=True) as running:
        text = asyncio.create_task(running.client.complete(PROMPT, max_tokens=60, ignore_eos=True))
        async with joining(running.orchestrator.address) as call:
            await introduce(call, await fitting(running))
            await call.write(FLOOD)
            cut = await failure(call)
        assert cut.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "it is let in again after 60 s" in str(cut.details())
        assert retry_after(cut) == QUARANTINE
        async with joining(running.orchestrator.address) as call:
            barred = await failure(call)
        assert barred.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 0 < (retry_after(barred) or 0) <= QUARANTINE
        assert list((await asyncio.wait_for(text, LIMIT_S)).tokens) == plain(SLOW_TARGET, PROMPT, 60)


async def test_what_waited_with_its_hello_is_barred_like_any_other() -> None:
    async with stack(SLOW_TARGET, accept_drafters=True) as running:
        hub, peers = running.orchestrator._hub, running.orchestrator.orchestrator.pool.drafters
        address, told = running.orchestrator.address, await fitting(running)
        async with joining(address) as flooding, joining(address) as joined, joining(address) as waiting:
            for call in (flooding, joined):
                await introduce(call, told)
            await until(lambda: len(hub._awaited) == 1)
            await flooding.write(FLOOD)
            assert (await ending(flooding))[0] == (await ending(joined))[0] == "RESOURCE_EXHAUSTED"
            await waiting.write(draft_pb2.JoinRequest(model=told))
            assert (await ending(waiting))[0] == "RESOURCE_EXHAUSTED"
            await until(lambda: peers == [])


async def test_hellos_that_are_waited_for_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_JOINED", 2)
    async with stack(SLOW_TARGET, accept_drafters=True) as running:
        hub, address = running.orchestrator._hub, running.orchestrator.address
        async with joining(address) as first, joining(address) as second:
            await until(lambda: len(hub._awaited) == 2)
            async with joining(address) as third:
                assert await ending(third) == ("RESOURCE_EXHAUSTED", "2 drafters have joined already")
            for call in (first, second):
                await introduce(call, await fitting(running))


async def test_an_orchestrator_that_stops_waits_for_no_hello() -> None:
    async with stack(SLOW_TARGET, accept_drafters=True) as running, joining(running.orchestrator.address) as call:
        hub = running.orchestrator._hub
        await until(lambda: len(hub._awaited) == 1)
        hub.leave()
        assert await ending(call) == ("UNAVAILABLE", "the orchestrator is stopping")


async def test_it_cannot_claim_the_host_of_the_verifier() -> None:
    async with stack(SLOW_TARGET, accept_drafters=True) as running, joining(running.orchestrator.address) as call:
        known = running.orchestrator.orchestrator
        target = known.pool.require_target().info
        claim = await fitting(running)
        claim.host_id, claim.device = target.host_id, target.device
        await introduce(call, claim)
        (joined,) = (drafter.info for drafter in known.pool.drafters)
        assert joined is not None
        assert not share_host(target, joined)
        assert not share_host(INFO(device=target.device), joined)
        shown = await running.client.server_info()
        assert shown.target.model
        assert [each.host_id for each in (shown.target, *shown.drafters)] == ["", ""]


# Who may read along


@pytest.mark.parametrize("name", ["localhost", "test"])  # an alternative name, and the common name
async def test_only_who_is_named_may_join(name: str) -> None:
    ours, drafters = Authority(), Authority("drafters")
    async with stack(SLOW_TARGET) as running:
        tls = ours.server(client_ca=drafters)
        for accepted in (name, "another"):
            hub = await running.another(tls=tls, accept_drafters=True, drafter_names=(accepted,))
            if accepted == name:
                async with dialled(hub.address, tls=ours.client(drafters.sign())):
                    assert [peer.up for peer in hub.orchestrator.pool.drafters] == [True]
                await raised(JoinRefused, dial(hub.address, drafters.client()), "is not trusted")
            else:
                with pytest.raises(JoinRefused, match="the certificate names 127.0.0.1, localhost, test, and"):
                    await dial(hub.address, ours.client(drafters.sign()))


# ----------------------------------------------------------------------------------------------------------------------
# Drafters that dial in show a token of their own, and may not send messages of any size.

CLIENT, DRAFTER = "the-token-of-a-client", "the-token-of-a-drafter"
ACCESS = Access(Keys({CLIENT: "ada"}), Keys({DRAFTER: "attic"}))


@asynccontextmanager
async def keyed_hub() -> AsyncIterator[RunningOrchestrator]:
    async with stack(SLOW_TARGET, patient=True) as running:
        yield await running.another(accept_drafters=True, access=ACCESS, plan=TURNS)


@pytest.mark.parametrize("token", ["", CLIENT, "a-token-of-nobody"])
async def test_no_other_token_lets_a_drafter_in(token: str) -> None:
    async with keyed_hub() as running:
        await raised(JoinRefused, dial(running.address, token=token), "refused this drafter: authorization: ")
        assert running.orchestrator.pool.drafters == []


async def test_a_message_beyond_the_cap_ends_the_line_and_bars_its_owner() -> None:
    async with keyed_hub() as running, open_channel(running.address, token=DRAFTER) as channel:
        stub = draft_pb2_grpc.DraftHubServiceStub(channel)
        call = stub.Join(timeout=LIMIT_S)
        target = running.orchestrator.pool.require_target().info
        await introduce(call, INFO(vocabulary_fingerprint=target.vocabulary_fingerprint))
        await call.write(draft_pb2.JoinRequest(said={"proposals": [{"tokens": [1] * MOST_SAID_BYTES}]}))
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"at most {MOST_SAID_BYTES} are taken" in (await call.details() or "")
        again = stub.Join(timeout=LIMIT_S)
        assert await again.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "attic flooded; it is let in again in" in (await again.details() or "")
        assert running.orchestrator.pool.drafters == []


async def test_it_waits_for_its_orchestrator_and_joins_again(capsys: pytest.CaptureFixture[str]) -> None:
    async with stack(SLOW_TARGET, accept_drafters=True) as running:
        options = running.orchestrator.orchestrator.options
        async with dialled(running.orchestrator.address) as drafter:
            await running.orchestrator.stop(0.0)
            again = OrchestratorOptions(options.verifiers, listen=drafter.address, accept_drafters=True)
            second = await orchestrator.server.start(again)
            try:
                await until(lambda: any(peer.up for peer in second.orchestrator.pool.drafters))
            finally:
                await second.stop(0.0)
    said = capsys.readouterr().err
    assert f"{drafter.address}: the orchestrator is stopping; dialling again" in said
    assert f"joined {drafter.address} again" in said
