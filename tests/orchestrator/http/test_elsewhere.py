"""A stream that is resumed at another orchestrator with the same log."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2 as httpx

from orchestrator import server
from orchestrator.api.requests import keyed_seed
from orchestrator.options import OrchestratorOptions
from specwire.core.law.sampling import DRAWN_SEED_BITS
from tests.orchestrator.http.front import COMPLETIONS, LIMIT_S, parsed, text_of
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.stack import DRAFT, PROMPT, SLOW_TARGET, TARGET, held, plain, stack
from tests.wait import until

WISH: dict[str, Any] = {
    "prompt": list(PROMPT),
    "max_tokens": 80,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "request_id": "moved",
}


async def test_who_has_lost_its_connection_may_have_the_session_driven_elsewhere() -> None:
    """Also before its first event, where there is no place in the stream that it could name."""
    with RedisServer() as redis:
        async with stack(SLOW_TARGET, redis_url=redis.url, http="127.0.0.1:0") as parts:
            options = OrchestratorOptions((parts.verifier.address,), redis_url=redis.url, http="127.0.0.1:0")
            other = await server.start(options)
            try:
                async with httpx.AsyncClient(base_url=str(other.http), timeout=LIMIT_S) as client:
                    with held(30):
                        await _begin(str(parts.orchestrator.http))
                        taking = asyncio.create_task(client.post(COMPLETIONS, json={**WISH, "take_over": True}))
                        await until(lambda: other.orchestrator.tally.claims)
                    for answer in (await taking, await client.post(COMPLETIONS, json=WISH)):
                        assert text_of(parsed(answer.text)) == " ".join(map(str, plain(TARGET, PROMPT, 80)))
                    assert other.orchestrator.tally.claims == 1
            finally:
                await other.stop(0.0)


async def test_a_stream_goes_on_where_its_orchestrator_left_it() -> None:
    with RedisServer() as redis:
        await _moved(redis.url)


async def _moved(url: str) -> None:
    async with stack(SLOW_TARGET, DRAFT, redis_url=url, http="127.0.0.1:0") as parts:
        options = OrchestratorOptions((parts.verifier.address,), redis_url=url, http="127.0.0.1:0")
        other = await server.start(options)
        try:
            begun, place = await _begin(str(parts.orchestrator.http))
            await parts.orchestrator.stop(0.0)
            async with httpx.AsyncClient(base_url=str(other.http), timeout=LIMIT_S) as client:
                rest = await client.post(COMPLETIONS, json=WISH, headers={"Last-Event-ID": place})
        finally:
            await other.stop(0.0)
    assert begun
    assert begun + text_of(parsed(rest.text)) == " ".join(map(str, plain(TARGET, PROMPT, 80)))


async def test_one_request_id_has_one_seed_at_all_orchestrators_of_a_log() -> None:
    """Also where its session is gone: nothing of the first text is left then but the seed's secret."""
    wish = {**WISH, "stream": False, "temperature": 1.0, "max_tokens": 12, "request_id": "drawn"}
    with RedisServer() as redis:
        async with stack(TARGET, redis_url=redis.url, http="127.0.0.1:0") as parts:
            options = OrchestratorOptions((parts.verifier.address,), redis_url=redis.url, http="127.0.0.1:0")
            other = await server.start(options)
            try:
                first = await _done(str(parts.orchestrator.http), wish)
                joined = await _done(str(other.http), wish)
                session_id = first["specwire"]["session_id"]
                await parts.client.delete_session(session_id)
                later = await _done(str(other.http), wish)
                await parts.client.delete_session(later["specwire"]["session_id"])
                called = await parts.client.complete(
                    PROMPT, temperature=1.0, max_tokens=12, ignore_eos=True, request_id="drawn"
                )
            finally:
                await other.stop(0.0)
    assert joined["specwire"]["session_id"] == session_id != later["specwire"]["session_id"]
    assert {first["text"], joined["text"], later["text"]} == {called.text}
    assert {each["specwire"]["seed"] for each in (first, joined, later)} == {called.seed}


def test_a_drawn_seed_is_of_secret_tenant_request_and_prompt() -> None:
    asked = [(b"1", "a", "1", 0), (b"2", "a", "1", 0), (b"1", "", "a1", 0), (b"1", "a", "", 10), (b"1", "a", "1", 1)]
    assert len({keyed_seed(*each) for each in asked}) == len(asked)
    assert all(0 <= keyed_seed(*each) < 1 << DRAWN_SEED_BITS for each in asked)


async def _done(url: str, wish: dict[str, Any]) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
        answer = await client.post(COMPLETIONS, json=wish)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def _begin(url: str) -> tuple[str, str]:
    """The text of the first few events, and the last one's id."""
    events: list[dict[str, Any]] = []
    ids: list[str] = []
    async with (
        httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client,
        client.stream("POST", COMPLETIONS, json=WISH) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                ids.append(line.removeprefix("id: "))
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
            if len(events) > 2:
                break
    return text_of(events), ids[-1]
