"""Rules that look at proposals, through a whole stack: what is marked, what is refused, what a lost verifier costs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any
from unittest.mock import patch

import grpc
import grpc.aio
import pytest

import specwire.lm.guesses
from orchestrator.store import SessionRecord
from orchestrator.store.encoding import decode_record, encode_record
from orchestrator.tenants import Access
from specwire.client import AsyncClient, Chunk, Completion, Finished, SpecwireError, Started
from specwire.client.events import PartialCompletion
from specwire.client.requests import RequestOptions, generate_request
from specwire.core.draft import DraftRow, DraftSession
from specwire.core.law.noise import epoch_of
from specwire.core.law.sampling import GUESSING_RULES, Acceptance, Sampling, with_rule
from specwire.core.messages import Pace
from specwire.core.text import Stopping
from specwire.v1 import generation_pb2, generation_pb2_grpc
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.stack import DRAFT, PROMPT, SLOW_TARGET, TARGET, Stack, stack
from tests.wait import asked, raised

RULES = ("rejection", "block", "threshold(0.1)", "typical(0.3,0.09)")


@pytest.mark.parametrize("rule", RULES)
async def test_a_rule_asked_for_by_name_is_the_one_in_force_and_says_whether_it_is_lossy(rule: str) -> None:
    lossy = rule[0] == "t"
    async with stack(SLOW_TARGET, DRAFT, plan="stream:1,4,1", patient=True) as running:
        wish = RequestOptions(max_tokens=40, temperature=1.0, rule=rule, ignore_eos=True)
        done = await asked(lambda: running.client.complete(PROMPT, **wish), lambda told: told.stats.proposed)
        state = await running.client.get_session(done.session_id)
    assert (done.sampling.rule, done.lossy, state.lossy) == (rule, lossy, lossy)
    assert len(done.tokens) == 40
    assert done.stats.proposed_ngram == 0


@pytest.mark.parametrize("rule", RULES)
async def test_where_drafters_are_let_in_no_rule_trusts_them_unless_it_is_named(rule: str) -> None:
    """A drafter from elsewhere may lie about what it drew from."""
    wish: dict[str, Any] = {"max_tokens": 4, "temperature": 1.0, "ignore_eos": True}
    async with stack(TARGET, accept_drafters=True) as open_to_all:
        caught = await raised(SpecwireError, open_to_all.client.complete(PROMPT, rule=rule, **wish))
        assert caught.code is grpc.StatusCode.INVALID_ARGUMENT
        assert f"rule: {Acceptance.parse(rule)} is not allowed here" in caught.message
        assert (await open_to_all.client.complete(PROMPT, rule="coupled", **wish)).sampling.rule == "coupled"
    named = Access(rules=frozenset({Acceptance.parse(rule).rule}))
    async with stack(TARGET, accept_drafters=True, access=named) as trusting:
        assert (await trusting.client.complete(PROMPT, rule=rule, **wish)).sampling.rule == rule
        await raised(SpecwireError, trusting.client.complete(PROMPT, **wish), "rule: coupled is not allowed here")


async def test_a_session_of_a_rule_that_is_not_allowed_here_goes_on_without_drafters(redis: RedisServer) -> None:
    async with stack(SLOW_TARGET, DRAFT, redis_url=redis.url, plan="stream:1,4,1") as running:
        access = Access(rules=GUESSING_RULES)
        strict = await running.another(running.drafters[0].address, plan="stream:1,4,1", access=access)
        wish = RequestOptions(max_tokens=200, temperature=1.0, rule="rejection", ignore_eos=True, request_id="moves")
        async with aclosing(running.client.generate(PROMPT, **wish)) as events:
            started = await anext(events)
            assert isinstance(started, Started)
            while not isinstance(await anext(events), Chunk):
                pass
        driver = await strict.orchestrator.join(started.session_id, take_over=True)
        async with AsyncClient(strict.address) as client:
            told = [event async for event in client.watch(started.session_id)]
            assert isinstance(told[-1], Finished)
            assert sum(len(event.tokens) for event in told if isinstance(event, Chunk)) == 200
            assert (strict.orchestrator.tally.claims, driver.drafters.missing, len(driver.drafters)) == (1, 0, 0)
            with pytest.raises(SpecwireError, match="rule: rejection is not allowed here"):
                await client.complete(PROMPT, max_tokens=4, temperature=1.0, rule="rejection")


@pytest.mark.parametrize(("rule", "lossy"), [("", False), ("typical(0.3,0.09)", True)])
async def test_every_message_that_may_say_so_does(rule: str, lossy: bool) -> None:
    """Started and Finished of a session's own stream and of one that watches it, and GetSession: each by itself."""
    request = generate_request(PROMPT, max_tokens=12, temperature=1.0, rule=rule)
    said: dict[str, bool] = {}
    session_id = ""
    async with stack(TARGET, DRAFT) as running, grpc.aio.insecure_channel(running.client.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        async for answer in stub.Generate(request, timeout=120.0):
            if answer.WhichOneof("event") == "started":
                session_id, said["started"] = answer.started.session_id, answer.started.lossy
            elif answer.WhichOneof("event") == "finished":
                said["finished"] = answer.finished.lossy
        async for seen in stub.Watch(generation_pb2.WatchRequest(session_id=session_id), timeout=120.0):
            if seen.WhichOneof("event") == "started":
                said["watch, started"] = seen.started.lossy
            elif seen.WhichOneof("event") == "finished":
                said["watch, finished"] = seen.finished.lossy
        known = await stub.GetSession(generation_pb2.GetSessionRequest(session_id=session_id), timeout=120.0)
        said["session"] = known.lossy
    assert said == dict.fromkeys(("started", "finished", "watch, started", "watch, finished", "session"), lossy)


async def test_a_drafter_that_does_not_say_what_it_drew_from_changes_nothing() -> None:
    """Its proposals are dropped, and the text is the plain one of the session's own noise."""

    def mute(logits: object, places: list[DraftRow]) -> list[tuple[int, None]]:
        return [(1, None)] * len(places)

    async with stack(SLOW_TARGET, DRAFT, plan="stream:1,4,1") as running:
        with patch.object(specwire.lm.guesses, "draw_weighed", mute):
            done = await running.client.complete(
                PROMPT, max_tokens=20, temperature=1.0, rule="rejection", ignore_eos=True
            )
    assert (len(done.tokens), done.stats.proposed, done.stats.direct) == (20, 0, 20)


async def test_a_text_goes_on_at_another_verifier_in_another_epoch() -> None:
    """What was shown stands; the rest is decided, and drafted for, with other numbers."""
    epochs: list[int] = []
    advance = DraftSession.advance

    def watched(session: DraftSession, position: int, tokens: Sequence[int], pace: Pace, epoch: int = 0) -> int:
        epochs.append(epoch)
        return advance(session, position, tokens, pace, epoch)

    async def moved(running: Stack) -> Completion:
        gathered = PartialCompletion()
        wish = RequestOptions(max_tokens=60, temperature=1.0, rule="rejection", ignore_eos=True)
        epochs.clear()
        async for event in running.client.generate(PROMPT, **wish):
            before = len(gathered.tokens)
            gathered.add(event)
            if isinstance(event, Chunk) and before < 12 <= len(gathered.tokens):
                await running.verify_again()
        return gathered.completion()

    with patch.object(DraftSession, "advance", watched):
        async with stack(SLOW_TARGET, DRAFT, plan="stream:1,4,1") as running:
            done = await asked(lambda: moved(running), lambda _: len(set(epochs)) >= 2)
    assert len(done.tokens) == 60
    assert 0 not in epochs


def test_the_log_keeps_the_rule() -> None:
    for rule in RULES:
        sampling = with_rule(Sampling(1.0, seed=5), rule)
        kept = SessionRecord(session_id="s", prompt=PROMPT, sampling=sampling, stopping=Stopping(8))
        assert decode_record(encode_record(kept), kept.prompt).sampling == kept.sampling
    assert epoch_of(1, 1) != epoch_of(1, 2) != epoch_of(2, 1)
