"""A conversation's next turn, and what else shares a beginning, through the whole stack: figures, tenants, places."""

from __future__ import annotations

import grpc
import pytest

from orchestrator.tenants import Access
from specwire.client import AsyncClient, Completion, SpecwireError
from tests.orchestrator.stack import TARGET, plain, stack

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
