"""Who is proposed whose texts: a tenant's callers each other's, unless one asks not to; without keys nobody anybody's.

Figures, not times: what was tested and accepted says whether a text was there to be proposed.
"""

from __future__ import annotations

from typing import Any

import httpx2 as httpx

from orchestrator.server import RunningOrchestrator
from orchestrator.tenants import Access
from specwire.client import AsyncClient
from specwire.client.events import Stats
from tests.orchestrator.test_scopes import KEYS, LIMIT_S, TOKENS, serving

# Texts of this script do not repeat themselves.
TARGET = "scripted:5:memory=3:vocab=2000:delay_ms=1"
PROMPT = tuple(range(40, 60))
LENGTH = 120


async def asked(door: RunningOrchestrator, tenant: str, **more: Any) -> Stats:
    async with AsyncClient(door.address, token=TOKENS.get(tenant, "")) as client:
        done = await client.complete(PROMPT, max_tokens=LENGTH, ignore_eos=True, timeout=LIMIT_S, **more)
    return done.stats


async def test_a_tenant_is_proposed_its_own_texts_and_nobody_else_s() -> None:
    async with serving(Access(KEYS), target=TARGET) as (door,):
        first = (await asked(door, "ada")).accepted_ngram
        again = (await asked(door, "ada")).accepted_ngram
        assert first < LENGTH / 10
        assert again > LENGTH / 2
        assert (await asked(door, "bob")).accepted_ngram == first


async def test_a_private_request_gives_nothing_and_takes_nothing() -> None:
    async with serving(Access(KEYS), target=TARGET) as (door,):
        alone = (await asked(door, "ada", private=True)).tested_ngram
        assert (await asked(door, "ada")).tested_ngram == alone
        assert (await asked(door, "ada", private=True)).tested_ngram == alone
        assert (await asked(door, "ada")).accepted_ngram > LENGTH / 2


async def test_over_http() -> None:
    async with serving(Access(KEYS), target=TARGET) as (door,):
        wish = {"prompt": list(PROMPT), "max_tokens": LENGTH, "ignore_eos": True, "temperature": 0}
        headers = {"Authorization": f"Bearer {TOKENS['ada']}"}
        accepted = []
        async with httpx.AsyncClient(base_url=str(door.http), timeout=LIMIT_S, headers=headers) as client:
            for private in (False, True, False):
                answer = (await client.post("/v1/completions", json={**wish, "private": private})).json()
                accepted.append(answer["choices"][0]["specwire"]["stats"]["accepted_ngram"])
    assert max(accepted[:2]) < LENGTH / 10
    assert accepted[2] > LENGTH / 2


async def test_a_deleted_session_is_proposed_no_more() -> None:
    async with serving(Access(KEYS), target=TARGET) as (door,):
        async with AsyncClient(door.address, token=TOKENS["ada"]) as client:
            done = await client.complete(PROMPT, max_tokens=LENGTH, ignore_eos=True, timeout=LIMIT_S)
            await client.delete_session(done.session_id)
        assert (await asked(door, "ada")).accepted_ngram == done.stats.accepted_ngram


async def test_without_keys_all_callers_are_one_and_each_has_its_own_text_only() -> None:
    async with serving(Access(), target=TARGET) as (door,):
        first = (await asked(door, "")).accepted_ngram
        assert (await asked(door, "")).accepted_ngram == first < LENGTH / 10
