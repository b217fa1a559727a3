"""A conversation's next turn, and what else shares a beginning, through the whole stack: figures, tenants, places."""

from __future__ import annotations

from contextlib import AsyncExitStack, aclosing

import grpc
import pytest

import orchestrator.server
import verify_service.server
from orchestrator.options import OrchestratorOptions
from orchestrator.tenants import Access
from specwire.client import AsyncClient, Completion, SpecwireError
from specwire.rpc.keys import Keys
from specwire.rpc.server_options import ModelServiceOptions
from tests.orchestrator.stack import SLOW_TARGET, TARGET, plain, stack
from tests.wait import until

PROMPT = tuple(index % 50 + 3 for index in range(30))
ADA, BOB = "the-token-of-ada", "the-token-of-bob"
MORE = (4, 5, 6)


async def said(client: AsyncClient, prompt: tuple[int, ...], parent: str = "") -> Completion:
    return await client.complete(prompt, max_tokens=10, ignore_eos=True, parent=parent)


async def test_the_next_turn_finds_its_parent_s_cache_and_says_so() -> None:
    async with stack(TARGET, "scripted:7:vocab=64:agree=0.7") as running:
        first = await said(running.client, PROMPT)
        second = await said(running.client, MORE, parent=first.session_id)
    assert list(second.tokens) == plain(TARGET, (*PROMPT, *first.tokens, *MORE), 10)
    assert (first.stats.cached_tokens, second.prompt_tokens) == (0, 43)
    # The last decided token was not fed, unless it was a draft token.
    assert 39 <= second.stats.cached_tokens <= 40


async def test_the_next_turn_goes_where_its_parent_was_and_elsewhere_says_the_same() -> None:
    async with AsyncExitStack() as parts:
        verifiers = [await verify_service.server.start(ModelServiceOptions(SLOW_TARGET)) for _ in range(2)]
        for verifier in verifiers:
            parts.push_async_callback(verifier.stop, 0.0)
        known = OrchestratorOptions(tuple(verifier.address for verifier in verifiers))
        running = await orchestrator.server.start(known)
        parts.push_async_callback(running.stop, 0.0)
        client = await parts.enter_async_context(AsyncClient(running.address))
        pool = running.orchestrator.pool
        await until(lambda: all(peer.up for peer in pool.verifiers))
        busy = client.generate(PROMPT, max_tokens=1000, ignore_eos=True)
        async with aclosing(busy):
            await anext(busy)
            await anext(busy)  # its first token: one verifier has a session
            parent = await said(client, (*PROMPT, 1))
        await until(lambda: not any(peer.subjects for peer in pool.verifiers))
        turn = await said(client, MORE, parent=parent.session_id)
        home = pool.affinity.of(parent.session_id)
        # With equal loads others go to the first one.
        assert home == pool.verifiers[1].link.address
        assert pool.affinity.of(turn.session_id) == home
        assert turn.stats.cached_tokens >= 40
        await next(each for each in verifiers if each.address == home).stop(0.0)
        moved = await said(client, MORE, parent=parent.session_id)
    assert moved.tokens == turn.tokens
    assert moved.stats.cached_tokens == len(PROMPT)  # what the busy one left there


async def test_no_tenant_can_tell_what_another_has_in_a_cache() -> None:
    """Equal prompts of two tenants: the figures are those of a verifier that has never seen the prompt."""
    async with AsyncExitStack() as parts:
        verifier = await verify_service.server.start(ModelServiceOptions(TARGET, slots=4))
        parts.push_async_callback(verifier.stop, 0.0)
        access = Access(keys=Keys({ADA: "ada", BOB: "bob"}))
        running = await orchestrator.server.start(OrchestratorOptions((verifier.address,), access=access))
        parts.push_async_callback(running.stop, 0.0)
        ada = await parts.enter_async_context(AsyncClient(running.address, token=ADA))
        bob = await parts.enter_async_context(AsyncClient(running.address, token=BOB))
        cached = [(await said(client, PROMPT)).stats.cached_tokens for client in (ada, bob, ada, bob)]
    assert cached == [0, 0, 28, 28]


def test_scopes_tell_tenants_apart_and_nothing_about_them() -> None:
    one, other = Access(), Access()
    assert one.cache_scope("ada") == one.cache_scope("ada")
    assert len({one.cache_scope("ada"), one.cache_scope("bob"), one.cache_scope(""), other.cache_scope("ada")}) == 4
    assert Access(cache_salt=one.cache_salt).cache_scope("ada") == one.cache_scope("ada")
    assert b"ada" not in one.cache_scope("ada")


async def test_what_is_deleted_is_not_found_in_a_cache_again() -> None:
    async with stack() as running:
        first = await said(running.client, PROMPT)
        await running.client.delete_session(first.session_id)
        assert (await said(running.client, PROMPT)).stats.cached_tokens == 0


@pytest.mark.parametrize("priority", [-101, 101])
async def test_a_priority_out_of_range_is_refused_by_name(priority: int) -> None:
    async with stack() as running:
        with pytest.raises(SpecwireError, match=f"priority: must be from -100 to 100, not {priority}") as refused:
            await running.client.complete(PROMPT, max_tokens=1, priority=priority)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
