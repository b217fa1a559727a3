"""No tenant learns from a cache what another has asked: by counts, at both doors, in every way that a prefix is found.

Counts, not times: `Stats.cached_tokens` says how much of a prompt needed no forward, and what was not reused was fed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import httpx2 as httpx
import pytest

from orchestrator.server import RunningOrchestrator
from orchestrator.tenants import Access
from specwire.client import AsyncClient, SpecwireError, Started
from specwire.client.events import Stats
from specwire.rpc.keys import Keys
from tests.orchestrator.stack import SLOW_TARGET, TARGET, plain, stack
from tests.wait import raised

SECRET = tuple(index % 50 + 3 for index in range(30))
TOKENS = {"ada": "the-token-of-ada", "bob": "the-token-of-bob"}
KEYS = Keys({token: name for name, token in TOKENS.items()})
LENGTH = 10
LIMIT_S = 120.0


@asynccontextmanager
async def serving(*accesses: Access, target: str = TARGET, slots: int = 8) -> AsyncIterator[list[RunningOrchestrator]]:
    """Orchestrators before one verifier."""
    async with stack(target, slots=slots, access=accesses[0], http="127.0.0.1:0") as first:
        more = [await first.another(access=access, http="127.0.0.1:0") for access in accesses[1:]]
        yield [first.orchestrator, *more]


async def cached(door: RunningOrchestrator, tenant: str, prompt: tuple[int, ...] = SECRET, **more: Any) -> int:
    """Of this tenant's prompt, the tokens that were there already; the text is the target's in any case."""
    async with AsyncClient(door.address, token=TOKENS.get(tenant, "")) as client:
        done = await client.complete(prompt, max_tokens=LENGTH, ignore_eos=True, timeout=LIMIT_S, **more)
    assert list(done.tokens) == plain(TARGET, prompt, LENGTH)
    return done.stats.cached_tokens


async def answered(door: RunningOrchestrator, tenant: str, length: int, *wishes: dict[str, Any]) -> list[Any]:
    """What HTTP answers this tenant, wish by wish."""
    whole = {"max_tokens": length, "ignore_eos": True, "temperature": 0}
    headers = {"Authorization": f"Bearer {TOKENS[tenant]}"}
    async with httpx.AsyncClient(base_url=str(door.http), timeout=LIMIT_S, headers=headers) as client:
        return [(await client.post("/v1/completions", json=whole | wish)).json() for wish in wishes]


async def cached_over_http(door: RunningOrchestrator, tenant: str) -> int:
    (answer,) = await answered(door, tenant, LENGTH, {"prompt": SECRET})
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found == answer["choices"][0]["specwire"]["stats"]["cached_tokens"]
    return found


async def test_the_same_prompt_at_either_door() -> None:
    async with serving(Access(KEYS)) as (door,):
        assert await cached(door, "ada") == 0
        assert await cached_over_http(door, "bob") == 0
        assert await cached(door, "bob") == await cached_over_http(door, "ada") == len(SECRET) - 2


async def test_every_guess_at_another_s_text_is_as_if_nobody_had_asked() -> None:
    """Token by token, as one would feel for it: what a right guess brings is what a wrong one does."""
    async with serving(Access(KEYS), slots=16) as (door,):
        await cached(door, "ada")
        for length in (9, 16, len(SECRET)):
            right, wrong = SECRET[:length], (*SECRET[: length - 1], 63)
            # The second of bob's own guesses begins as the first did: that much is his, but for its last two tokens.
            assert await cached(door, "bob", (length, *right)) == 0
            assert await cached(door, "bob", (length, *wrong)) == length - 1


async def test_a_session_that_runs_is_not_shared_from_either() -> None:
    async with (
        serving(Access(KEYS), target=SLOW_TARGET) as (door,),
        AsyncClient(door.address, token=TOKENS["ada"]) as ada,
    ):
        events = ada.generate(SECRET, max_tokens=2000, ignore_eos=True, timeout=LIMIT_S)
        async with aclosing(events):
            await anext(events)
            await anext(events)  # its first token: all of the prompt has been fed
            assert await cached(door, "bob") == 0
            assert await cached(door, "ada") == len(SECRET) - 2


async def test_prompts_that_come_together_are_fed_for_each_tenant() -> None:
    """What is fed of them is counted in tests/verify_service/test_prefixes.py."""
    prompt = SECRET * 12  # so long that the second one waits for the first where they may share
    async with serving(Access(KEYS)) as (door,):
        both = await asyncio.gather(*(cached(door, tenant, prompt) for tenant in TOKENS))
    assert both == [0, 0]


async def test_a_parent_is_its_tenant_s_alone() -> None:
    async with serving(Access(KEYS)) as (door,):
        async with AsyncClient(door.address, token=TOKENS["ada"]) as ada:
            events = ada.generate(SECRET, max_tokens=LENGTH, ignore_eos=True, timeout=LIMIT_S)
            started = await anext(events)
            assert isinstance(started, Started)
            async for _ in events:
                pass
            turn = await ada.complete((4, 5), max_tokens=2, parent=started.session_id, timeout=LIMIT_S)
        unknown = await raised(SpecwireError, cached(door, "bob", (4, 5), parent=started.session_id))
        assert unknown.code is grpc.StatusCode.NOT_FOUND
        # Nor by sending all of it: what the parent has said is known to who was told.
        said = plain(TARGET, SECRET, LENGTH)
        assert await cached(door, "bob", (*SECRET, *said, 4, 5)) == 0
    assert turn.stats.cached_tokens >= len(SECRET)


async def test_only_orchestrators_with_one_salt_share_a_tenant_s_cache() -> None:
    """Without keys all callers are one tenant, which is nobody else's."""
    one = Access(KEYS, cache_salt=b"1" * 32)
    same, other, open_to_all = Access(KEYS, cache_salt=b"1" * 32), Access(KEYS), Access(cache_salt=b"1" * 32)
    async with serving(one, same, other, open_to_all) as doors:
        assert await cached(doors[0], "ada") == 0
        assert await cached(doors[1], "ada") == len(SECRET) - 2
        assert await cached(doors[1], "bob") == 0
        assert await cached(doors[2], "ada") == 0
        assert await cached(doors[3], "nobody") == 0
        assert await cached(doors[3], "anybody") == len(SECRET) - 2


async def test_where_another_evicts_it_is_only_gone() -> None:
    """What a tenant may learn of another's load, as docs/SECURITY.md says: that its own is no longer there."""
    async with serving(Access(KEYS), slots=2) as (door,):
        assert await cached(door, "ada") == 0
        for first in range(3, 6):
            assert await cached(door, "bob", (first, *SECRET)) == 0
        assert await cached(door, "ada") == 0


# ----------------------------------------------------------------------------------------------------------------------
# Who is proposed whose texts: a tenant's callers each other's, unless one asks not to; without keys nobody anybody's.

# Texts of this script do not repeat themselves.
TEXTS = "scripted:5:memory=3:vocab=2000:delay_ms=1"
ASKED = tuple(range(40, 60))
TEXT_LENGTH = 120


async def stats_of(door: RunningOrchestrator, tenant: str, **more: Any) -> Stats:
    async with AsyncClient(door.address, token=TOKENS.get(tenant, "")) as client:
        done = await client.complete(ASKED, max_tokens=TEXT_LENGTH, ignore_eos=True, timeout=LIMIT_S, **more)
    return done.stats


async def test_a_tenant_is_proposed_its_own_texts_and_nobody_else_s() -> None:
    async with serving(Access(KEYS), target=TEXTS) as (door,):
        first = (await stats_of(door, "ada")).accepted_ngram
        again = (await stats_of(door, "ada")).accepted_ngram
        assert first < TEXT_LENGTH / 10
        assert again > TEXT_LENGTH / 2
        assert (await stats_of(door, "bob")).accepted_ngram == first


async def test_a_private_request_gives_nothing_and_takes_nothing() -> None:
    async with serving(Access(KEYS), target=TEXTS) as (door,):
        alone = (await stats_of(door, "ada", private=True)).tested_ngram
        assert (await stats_of(door, "ada")).tested_ngram == alone
        assert (await stats_of(door, "ada", private=True)).tested_ngram == alone
        assert (await stats_of(door, "ada")).accepted_ngram > TEXT_LENGTH / 2


async def test_a_deleted_session_is_proposed_no_more_nor_found_in_a_cache() -> None:
    async with serving(Access(KEYS), target=TEXTS) as (door,):
        async with AsyncClient(door.address, token=TOKENS["ada"]) as client:
            done = await client.complete(ASKED, max_tokens=TEXT_LENGTH, ignore_eos=True, timeout=LIMIT_S)
            await client.delete_session(done.session_id)
        again = await stats_of(door, "ada")
    assert (again.accepted_ngram, again.cached_tokens) == (done.stats.accepted_ngram, 0)


async def test_without_keys_all_callers_are_one_and_each_has_its_own_text_only() -> None:
    async with serving(Access(), target=TEXTS) as (door,):
        first = (await stats_of(door, "")).accepted_ngram
        assert (await stats_of(door, "")).accepted_ngram == first < TEXT_LENGTH / 10


def test_scopes_tell_tenants_apart_and_nothing_about_them() -> None:
    one, other = Access(), Access()
    assert one.cache_scope("ada") == one.cache_scope("ada")
    assert len({one.cache_scope("ada"), one.cache_scope("bob"), one.cache_scope(""), other.cache_scope("ada")}) == 4
    assert Access(cache_salt=one.cache_salt).cache_scope("ada") == one.cache_scope("ada")
    assert b"ada" not in one.cache_scope("ada")


@pytest.mark.parametrize("priority", [-101, 101])
async def test_a_priority_out_of_range_is_refused_by_name(priority: int) -> None:
    async with stack() as running:
        refused = await raised(
            SpecwireError,
            running.client.complete(SECRET, max_tokens=1, priority=priority),
            f"priority: must be from -100 to 100, not {priority}",
        )
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
