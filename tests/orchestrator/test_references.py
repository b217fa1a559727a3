"""A request's references through a whole stack: faster, the same text, and gone when the session is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

import verify_service.server
import verify_service.service
from specwire.client import Chunk, Event, Finished, Started
from specwire.client.requests import Text
from specwire.core.messages import FinishReason
from specwire.v1 import verify_pb2
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.stack import PROMPT, SLOW_TARGET, TARGET, Stack, held, plain, stack
from tests.orchestrator.test_watching import pair, watched
from tests.wait import LIMIT_S, asked, until
from verify_service.service import tick_from_wire

LENGTH = 80
# No other source proposes: of these texts, none repeats itself.
WISH: dict[str, Any] = {"max_tokens": LENGTH, "ignore_eos": True, "drafting": False, "ngram": True}


def text_of(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def driven(running: Stack) -> list[Any]:
    return list(running.orchestrator.orchestrator.sessions.values())


@pytest.mark.parametrize("form", [text_of, list], ids=["text", "tokens"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_a_guess_from_the_second_reference_is_accepted_and_the_text_is_the_same(
    form: Any, temperature: float
) -> None:
    wish: dict[str, Any] = {**WISH, "temperature": temperature, "seed": 9}
    async with stack(SLOW_TARGET) as running:
        without = await running.client.complete(PROMPT, **wish)
        references: list[Text] = [form([8, 8, 9, 9] * 5000), form(without.tokens)]
        done = await asked(
            lambda: running.client.complete(PROMPT, references=references, **wish),
            lambda told: told.stats.accepted_prediction > LENGTH // 2,
        )
        assert done.tokens == without.tokens
        assert done.stats.proposed_prediction >= done.stats.tested_prediction >= done.stats.accepted_prediction
        assert without.stats.proposed_prediction == 0
        both = await running.client.complete(PROMPT, references=references, prediction=form([1, 2, 3]), **wish)
        assert both.tokens == without.tokens
        assert [driver.verifying.references for driver in driven(running)] == [()] * len(driven(running))


@pytest.mark.parametrize("how", ["taken", "no texts asked for", "a rule without guesses", "no memory for texts"])
async def test_they_are_sent_to_a_verifier_that_takes_them_only(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = list[verify_pb2.ReferencePart]()

    def told(link: int, message: verify_pb2.ConnectVerifyRequest, *rest: Any) -> Any:
        parts.extend(message.references)
        return tick_from_wire(link, message, *rest)

    monkeypatch.setattr(verify_service.service, "tick_from_wire", told)
    more: dict[str, Any] = {}
    if how == "no texts asked for":
        more = {"ngram": False}
    elif how == "a rule without guesses":
        more = {"temperature": 1.0, "rule": "rejection"}
    async with stack(SLOW_TARGET) as running:
        if how == "no memory for texts":
            (peer,) = running.orchestrator.orchestrator.pool.verifiers
            assert peer.info is not None
            peer.info.text_room = 0
        await running.client.complete(PROMPT, references=[[5] * 100], **{**WISH, **more})
    assert len(parts) == (how == "taken")


async def test_a_verifier_that_starts_anew_is_sent_them_again() -> None:
    expected = plain(TARGET, PROMPT, LENGTH)

    async def told() -> int:
        """Tokens of references that were accepted after the restart."""
        async with stack(SLOW_TARGET) as running:
            with held(10) as let_go:
                references: list[Text] = [expected[LENGTH // 2 :]]
                events = running.client.generate(PROMPT, references=references, **WISH)
                started = await anext(events)
                assert isinstance(started, Started)
                (driver,) = driven(running)
                await until(lambda: len(driver.view.output.tokens) > 3)
                let_go(2)
                await running.verifier.stop(0.0)
                before = driver.view.stats.shown.accepted
            await running.verify_again()
            tokens, last = await rest(events)
            assert tokens == expected
            assert driver.view.stats.verifier_losses == 1
            assert last.stats.accepted == last.stats.accepted_prediction + last.stats.accepted_ngram
            return last.stats.accepted_prediction - int(before)

    assert await asked(told, lambda accepted: accepted > LENGTH // 4)


async def rest(events: AsyncGenerator[Event, None]) -> tuple[list[int], Finished]:
    tokens: list[int] = []
    last: Event | None = None
    async with asyncio.timeout(LIMIT_S):
        async for event in events:
            if isinstance(event, Chunk):
                tokens += event.tokens
            last = event
    assert isinstance(last, Finished)
    return tokens, last


@pytest.mark.parametrize("verifier_too", [False, True], ids=["the verifier stays", "it starts anew"])
async def test_an_orchestrator_that_takes_the_session_over_writes_the_same_text(
    server: RedisServer, verifier_too: bool
) -> None:
    """The log has no references: a verifier that still holds the session goes on with them, another one without."""
    expected = plain(TARGET, PROMPT, LENGTH)
    async with pair(server) as both:
        with held(10):
            events = both.first.generate(PROMPT, references=[text_of(expected)], request_id="mine", **WISH)
            started = await anext(events)
            assert isinstance(started, Started)
            await anext(events)
            await both.stack.orchestrator.stop(0.0)
        if verifier_too:
            await both.stack.verify_again()
        await until(lambda: any(each.up for each in both.other.orchestrator.pool.verifiers))
        seen = await watched(both.other.address, session_id=started.session_id, take_over=True)
    assert seen == expected


async def test_a_deleted_session_leaves_none() -> None:
    async with stack(SLOW_TARGET) as running:
        with held(10):
            events = running.client.generate(PROMPT, references=[[5] * 5000], **WISH)
            started = await anext(events)
            assert isinstance(started, Started)
            await anext(events)
            (driver,) = driven(running)
            assert list(map(len, driver.verifying.references)) == [5000]
            deleting = asyncio.create_task(running.client.delete_session(started.session_id))
            await until(lambda: driver.verifying.references == ())
        await deleting
        _, last = await rest(events)
        assert last.reason is FinishReason.CANCELLED
