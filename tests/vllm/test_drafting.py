"""What is proposed for the rows of a batch: texts stay the target's own, requests are known by their texts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from bench.harness.certificates import Authority
from draft_service.server import RunningDrafter, start
from specwire.core.verify.session import RunningSession
from specwire.lm import load_model
from specwire.lm.scripted import Script
from specwire.registry.options import NOWHERE, RegistryOptions
from specwire.rpc.keys import Keys
from specwire.rpc.server_options import ModelServiceOptions
from specwire.rpc.tls import ServerTls
from specwire.vllm.drafting import FIRST_STEPS, KEPT_S, Drafting, DraftingOptions, VllmTarget
from tests.faults.hostile import ATTACKS, hostile
from tests.faults.stack import PLAIN
from tests.orchestrator.redis_for_tests import RedisServer
from tests.vllm.batch import Batch, Text, rows_of
from tests.wait import until

MODEL = "scripted:7"
INFO = load_model(MODEL, slots=1).info
ENGINE = VllmTarget(
    "target", INFO.vocabulary, INFO.vocabulary_fingerprint, context=256, most=4, leads=True, device="gpu"
)
OFF = DraftingOptions(ngram=False)
# Of a step of the target: drafters compute meanwhile.
STEP_S = 0.004
PROMPTS = ((5, 6, 7), (9, 8), (11, 12, 13, 14))


@asynccontextmanager
async def drafter(
    model: str = MODEL,
    listen: str = "127.0.0.1:0",
    tls: ServerTls | None = None,
    keys: Keys | None = None,
    registration: RegistryOptions = NOWHERE,
) -> AsyncIterator[RunningDrafter]:
    running = await start(ModelServiceOptions(model, listen=listen, slots=8, tls=tls, keys=keys), registration)
    try:
        yield running
    finally:
        await running.stop()


@asynccontextmanager
async def drafting(
    *addresses: str,
    options: DraftingOptions = OFF,
    engine: VllmTarget = ENGINE,
    now_s: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Drafting]:
    """Give it with all its drafters connected."""
    one = Drafting(engine, replace(options, drafters=addresses), now_s)
    one.start()
    try:
        await until(lambda: all(peer.info is not None for peer in one.drafters))
        yield one
    finally:
        await one.stop()


def batch(one: Drafting, script: str = MODEL, most: int | None = None) -> Batch:
    def propose(*told: Any) -> list[list[int]]:
        proposed = one.step(rows_of(*told))
        one.settle()
        return proposed

    return Batch(Script.parse(script), ENGINE, propose, most)


async def write(running: Batch, texts: list[Text], length: int) -> None:
    """Step until each has `length` tokens, as it would have alone."""
    while any(len(text.output) < length for text in texts):
        running.step()
        await asyncio.sleep(STEP_S)
    for text in texts:
        assert text.output == running.plain(text.prompt, len(text.output))


@pytest.mark.parametrize("model", [MODEL, "scripted:7:agree=0.6", "scripted:8"], ids=["right", "doubtful", "wrong"])
async def test_a_drafter_drafts_and_changes_no_text(model: str) -> None:
    async with drafter(model) as running, drafting(running.address) as one:
        served = batch(one)
        texts = [served.add(prompt) for prompt in (*PROMPTS, PROMPTS[0])]
        await write(served, texts, 80)
        assert len(one._requests) == len(texts), "two with one text are two"
        if model == MODEL:
            assert sum(text.accepted for text in texts) > 0


async def test_a_drafter_beside_vllm_stops_for_a_batch() -> None:
    """They share cores there, and vLLM takes no turns: nobody would know what it gains all and costs all."""
    async with drafter() as running, drafting(running.address, engine=replace(ENGINE, device=INFO.device)) as one:
        served = batch(one)
        texts = [served.add(prompt) for prompt in PROMPTS]
        length = 0
        while length < 20 or any(request.pace.run_ahead for request in one._requests.values()):
            length += 1
            assert length < 200
            await write(served, texts, length)
        assert len(one._requests) == len(PROMPTS)
        assert all(request.drafter is not None for request in one._requests.values())


async def test_steps_that_do_not_wait_are_followed_as_well() -> None:
    """Where nothing is there to be proposed vLLM goes on at once."""
    waited: Counter[bool] = Counter()
    async with drafter() as running, drafting(running.address) as one:

        def propose(*told: Any) -> list[list[int]]:
            rows, waits = rows_of(*told), not one.nothing_offered
            waited[waits] += 1
            proposed: list[list[int]] = [[] for _ in rows]
            if waits:
                proposed = one.step(rows)
            else:
                one.note(rows, time.monotonic())
            one.settle()
            return proposed

        served = Batch(Script.parse(MODEL), ENGINE, propose)
        texts = [served.add(prompt) for prompt in PROMPTS]
        await write(served, texts, 80)
        assert sum(text.accepted for text in texts) > 0
        assert len(one._requests) == len(PROMPTS)
    assert min(waited[False], waited[True]) > 1


@pytest.mark.parametrize("attack", ATTACKS)
async def test_no_drafter_that_lies_changes_a_text_or_ends_one(attack: str) -> None:
    known = load_model(PLAIN, slots=1).info
    engine = replace(ENGINE, vocabulary=known.vocabulary, vocabulary_fingerprint=known.vocabulary_fingerprint)
    with hostile(ATTACKS[attack]) as liar:
        async with drafting(liar.address, engine=engine) as one:
            served = batch(one, PLAIN)
            await write(served, [served.add(prompt) for prompt in PROMPTS], 100)
            assert liar.attacked()


async def test_what_the_texts_repeat_is_proposed_without_any_drafter() -> None:
    script = "scripted:7:memory=2:vocab=8"
    info = load_model(script, slots=1).info
    engine = replace(ENGINE, vocabulary=info.vocabulary, vocabulary_fingerprint=info.vocabulary_fingerprint)
    async with drafting(options=DraftingOptions(), engine=engine) as one:
        served = batch(one, script)
        text = served.add((1, 2, 3))
        await write(served, [text], 120)
        assert text.accepted > 60
        assert served.steps < 80


async def test_requests_are_known_by_their_texts_wherever_their_rows_are() -> None:
    """VLLM moves rows when a request ends, and takes one out and back in when memory is short."""
    async with drafter() as running, drafting(running.address) as one:
        served = batch(one)
        texts = [served.add(prompt) for prompt in PROMPTS]
        await write(served, texts, 12)
        opened = next(one._numbers)
        served.rows = [texts[2], texts[0]]
        await write(served, [texts[2], texts[0]], 24)
        served.rows = [texts[1], None, texts[0], texts[2]]
        await write(served, texts, 48)
        assert next(one._numbers) == opened + 1


async def test_less_may_be_tested_than_was_proposed() -> None:
    async with drafter() as running, drafting(running.address) as one:
        served = batch(one, most=1)
        text = served.add(PROMPTS[0])
        await write(served, [text], 60)
        assert text.tested <= served.steps


async def test_a_text_ends_at_the_context() -> None:
    """Nothing is proposed before it is known what steps take."""
    async with drafter() as running, drafting(running.address) as one:
        served = batch(one)
        text = served.add(tuple(range(2, 60)) * 3)
        while len(text.tokens) < ENGINE.context:
            served.step()
            await asyncio.sleep(STEP_S)
            assert served.steps > FIRST_STEPS or text.window == []
        assert text.output == served.plain(text.prompt, len(text.output))


async def test_a_lost_drafter_is_replaced_by_another_and_comes_back() -> None:
    async with drafter() as first:
        address = first.address
        async with drafter() as second, drafting(address, second.address) as one:
            served = batch(one)
            texts = [served.add(prompt) for prompt in PROMPTS]
            await write(served, texts, 20)
            await first.stop()
            await write(served, texts, 60)
            drafts = [request.drafter for request in one._requests.values()]
            assert {each.peer.link.address for each in drafts if each is not None} <= {second.address}
            async with drafter(listen=address):
                await until(lambda: all(peer.up for peer in one.drafters))
                await write(served, texts, 80)
            await second.stop()  # nobody is left
            await write(served, texts, 90)


async def test_links_are_encrypted_and_show_a_token() -> None:
    ours, token = Authority(), "a token of this test"
    async with drafter(tls=ours.server(), keys=Keys({token: "vllm"})) as running:
        for tls, shown, works in ((ours.client(), token, True), (ours.client(), "", False), (None, token, False)):
            await dial(Drafting(ENGINE, replace(OFF, tls=tls, token=shown, drafters=(running.address,))), works)


async def dial(one: Drafting, works: bool) -> None:
    """Hold that its only drafter takes part in a text, or that it is refused."""
    one.start()
    try:
        (peer,) = one.drafters
        await until(lambda: peer.up if works else "does not answer" not in (one._dialled.trouble(peer) or ""))
        assert peer.up is works
        if works:
            served = batch(one)
            text = served.add(PROMPTS[0])
            await write(served, [text], 40)
            assert text.accepted > 0
    finally:
        await one.stop()


async def test_drafters_are_found_in_the_registry() -> None:
    with RedisServer() as redis:
        async with drafting(options=replace(OFF, registry=redis.url)) as one:
            async with drafter(registration=RegistryOptions(redis.url)):
                await until(lambda: any(peer.up for peer in one.drafters))
                served = batch(one)
                text = served.add(PROMPTS[0])
                await write(served, [text], 40)
                assert text.accepted > 0
            await until(lambda: not one.drafters)


async def test_a_drafter_that_refuses_is_let_be() -> None:
    """It has room for no text of this length."""
    async with drafter() as running, drafting(running.address) as one:
        one._requests.clear()
        served = batch(one)
        text = served.add(PROMPTS[0])
        await write(served, [text], 12)
        request = next(iter(one._requests.values()))
        assert request.drafter is not None
        request.drafter._on_refused(request.drafter, "for this test")
        assert request.drafter is None
        assert list(request.rests) == one.drafters
        await write(served, [text], 20)
        assert request.drafter is None


async def test_one_with_another_vocabulary_is_not_used() -> None:
    async with drafter("scripted:7:vocab=32") as running, drafting(running.address) as one:
        assert not one.drafters[0].up
        served = batch(one)
        text = served.add(PROMPTS[0])
        await write(served, [text], 20)
        assert text.tested == 0


async def test_an_ended_request_is_forgotten_here_and_at_its_drafter() -> None:
    now_s = [1000.0]
    async with drafter() as running, drafting(running.address, now_s=lambda: now_s[0]) as one:
        await until(lambda: one.drafters[0].up)
        served = batch(one)
        text = served.add(PROMPTS[0])
        for _ in range(20):
            now_s[0] += STEP_S
            served.step()
            await asyncio.sleep(STEP_S)
        assert text.output
        assert one.drafters[0].sessions == 1
        now_s[0] += KEPT_S + 1.0
        one.sweep()
        assert one._requests == {}
        assert one.drafters[0].sessions == 0


@pytest.mark.parametrize("place", ["candidate", "decided", "propose"])
async def test_what_fails_for_one_request_ends_what_is_proposed_for_it_alone(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others are proposed to on; the failing one is not, and no text is another."""
    method, failed = getattr(RunningSession, place), list[RunningSession]()

    def called(self: RunningSession, *args: Any, **kwargs: Any) -> Any:
        if self.session.text.tokens[:2] == [9, 8]:
            failed.append(self)
            raise ZeroDivisionError("a bug, put there by the test")
        return method(self, *args, **kwargs)

    async with drafter() as serving, drafting(serving.address) as one:
        monkeypatch.setattr(RunningSession, place, called)
        running = batch(one)
        texts = [running.add(prompt) for prompt in PROMPTS]
        length = 0
        while not (failed and texts[0].accepted and texts[2].accepted):
            length += 1
            assert length < 200
            await write(running, texts, length)
    assert texts[1].accepted == 0
    assert "ZeroDivisionError" in caplog.text
