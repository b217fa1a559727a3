"""What a drafter writes by itself, over real gRPC: its law, its limits, and that drafting goes on beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import demo_pair
from draft_service import generation
from draft_service.commands import Written
from draft_service.server import RunningDrafter, start
from specwire.client import AsyncClient, Chunk, Completion, Finished, SpecwireError, Started
from specwire.core.law.sampling import Sampling
from specwire.core.messages import FinishReason
from specwire.core.text import hash_of
from specwire.rpc.errors import Context, StatusError
from specwire.rpc.keys import Keys
from specwire.rpc.server_options import ModelServiceOptions
from specwire.text import load_tokenizer
from specwire.v1 import generation_pb2 as pb
from specwire.v1 import generation_pb2_grpc
from tests.draft_service.peer import connected, continuation, pace, serving, tokens_of
from tests.orchestrator.tiny import tiny
from tests.wait import until

MODEL = "scripted:7"
# Whose text is still being written when something happens to it.
SLOW = "scripted:7:delay_ms=5"
PROMPT = [3, 1, 4, 1, 5]
# Of the ids of tests.orchestrator.tiny.
TEXT = list(range(1, 400, 9))
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return tiny(tmp_path_factory.mktemp("tiny"), 3)


@asynccontextmanager
async def asking(running: RunningDrafter, patience: float = 0.0, token: str = "") -> AsyncIterator[AsyncClient]:
    async with AsyncClient(running.address, patience=patience, token=token) as client:
        yield client


@asynccontextmanager
async def drafter(model: str, **more: Any) -> AsyncIterator[tuple[RunningDrafter, AsyncClient]]:
    async with serving(model, **more) as running, asking(running) as client:
        yield running, client


def reference(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def own_greedy(folder: str, prompt: Sequence[int], most: int) -> list[int]:
    """What transformers' own `generate` writes."""
    with torch.inference_mode():
        whole = reference(folder).generate(torch.tensor([list(prompt)]), max_new_tokens=most, do_sample=False)
    return list(whole[0, len(prompt) :].tolist())


def texts_of(running: RunningDrafter) -> dict[str, int]:
    """How many texts have a slot ("running"), and how many wait for one."""
    families = {family.name: family for family in running._served.now.figures.families()}
    return {sample.labels["state"]: int(sample.value) for sample in families["texts"].samples}


async def test_greedy_text_is_that_of_transformers(folder: str) -> None:
    async with drafter(folder) as (_, client):
        written = await client.complete(TEXT, max_tokens=48)
    assert list(written.tokens) == own_greedy(folder, TEXT, 48)
    text = AutoTokenizer.from_pretrained(folder).decode(list(written.tokens), skip_special_tokens=True)
    assert (written.text, written.session_id, written.prompt_tokens) == (text, "", len(TEXT))
    assert (written.stats.direct, written.stats.target_forwards) == (len(written.tokens),) * 2


async def test_log_probabilities_are_those_of_transformers(folder: str) -> None:
    async with drafter(folder) as (_, client):
        written = await client.complete(TEXT, max_tokens=24, temperature=1.0, seed=5, logprobs=3)
    with torch.inference_mode():
        logits = reference(folder)(torch.tensor([[*TEXT, *written.tokens]])).logits[0]
    log_p = logits.double().log_softmax(dim=1)
    assert len(written.logprobs) == len(written.tokens) == 24
    for at, (token, told) in enumerate(zip(written.tokens, written.logprobs, strict=True), len(TEXT) - 1):
        assert told.logprob == pytest.approx(float(log_p[at, token]), abs=1e-4)
        best = log_p[at].topk(3)
        assert [value for _, value in told.top] == pytest.approx(best.values.tolist(), abs=1e-4)


async def test_a_seed_gives_one_text_alone_and_in_company(folder: str) -> None:
    """In company its tokens come from rows of larger forwards."""
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "top_p": 0.95}
    async with drafter(folder, slots=4) as (_, client):
        alone = await client.complete(TEXT, seed=11, **options)
        many = await asyncio.gather(*(client.complete(TEXT, seed=seed, **options) for seed in (11, 11, 12, 13)))
    assert [each.tokens == alone.tokens for each in many] == [True, True, False, False]
    assert alone.sampling.seed == 11


async def test_the_law_is_the_targets() -> None:
    """Filters, penalties and noise as a verifier applies them; a drafter's guesses leave the unlikely out."""
    sampling = Sampling(temperature=1.3, top_k=9, seed=5)
    async with drafter(MODEL) as (_, client):
        written = await client.complete(PROMPT, max_tokens=12, temperature=1.3, top_k=9, seed=5, ignore_eos=True)
        penalised = await client.complete(PROMPT, max_tokens=12, presence_penalty=2.0, repetition_penalty=50.0)
    assert list(written.tokens) == continuation(MODEL, PROMPT, 12, sampling)
    assert len(set(penalised.tokens)) > len(set(continuation(MODEL, PROMPT, 12)))


async def test_what_ends_a_text(folder: str) -> None:
    async with drafter(folder) as (_, client):
        whole = await client.complete(TEXT, max_tokens=40)
        stop = whole.text[len(whole.text) // 2 :][:3]
        stopped = await client.complete(TEXT, max_tokens=40, stop=[stop])
        by_id = await client.complete(TEXT, max_tokens=40, stop_ids=[whole.tokens[4]])
        full = await client.complete(TEXT * 11, max_tokens=2000, fit_context=True, ignore_eos=True)
    assert (stopped.finish_reason, stopped.text) == (FinishReason.STOP_STRING, whole.text.partition(stop)[0])
    assert whole.tokens[: len(stopped.tokens)] == stopped.tokens
    first = whole.tokens.index(whole.tokens[4])
    assert (by_id.finish_reason, by_id.tokens) == (FinishReason.STOP_ID, whole.tokens[: first + 1])
    assert (full.finish_reason, len(TEXT) * 11 + len(full.tokens)) == (FinishReason.LENGTH, 512)


async def test_events_as_the_protocol_has_them() -> None:
    async with drafter(MODEL) as (_, client):
        events = [event async for event in client.generate(PROMPT, max_tokens=9, ignore_eos=True, echo=True)]
    started, *chunks, finished = events
    assert isinstance(started, Started)
    assert started.prompt is not None
    assert (started.prompt_hash, list(started.prompt.tokens), started.lossy) == (hash_of(PROMPT), PROMPT, False)
    at = len(PROMPT)
    for chunk in chunks:
        assert isinstance(chunk, Chunk)
        assert chunk.position == at
        at += len(chunk.tokens)
    assert isinstance(finished, Finished)
    assert (at, finished.reason) == (len(PROMPT) + 9, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (pb.GenerateRequest(chat=pb.Chat()), "chat: needs an orchestrator"),
        (pb.GenerateRequest(tokens=pb.TokenIds(ids=PROMPT), parent="x"), "parent: needs an orchestrator"),
        (pb.GenerateRequest(tokens=pb.TokenIds(ids=PROMPT), note="x"), "note: needs an orchestrator"),
        (pb.GenerateRequest(tokens=pb.TokenIds(ids=PROMPT), n=2), "n: must be at most 1 at a drafter, not 2"),
        (pb.GenerateRequest(), "prompt: must not be empty"),
        (pb.GenerateRequest(tokens=pb.TokenIds(ids=[64])), "prompt: token id 64 is outside 0..63"),
        (pb.GenerateRequest(tokens=pb.TokenIds(ids=[1] * 9)), "prompt: 9 tokens leave no room for another one"),
        (pb.GenerateRequest(text="a " * 999), "prompt: 1998 bytes of text, of at most "),
        (
            pb.GenerateRequest(tokens=pb.TokenIds(ids=PROMPT), stopping={"max_tokens": 4}),
            "max_tokens: 4 do not fit, the prompt leaves room for 3",
        ),
        (pb.GenerateRequest(tokens=pb.TokenIds(ids=PROMPT), sampling={"rule": "block"}), "rule: block contradicts"),
        (
            pb.GenerateRequest(tokens=pb.TokenIds(ids=PROMPT), sampling={"rule": "rejection", "temperature": 1}),
            "rule: rejection judges draft tokens",
        ),
        (
            pb.GenerateRequest(tokens=pb.TokenIds(ids=PROMPT), sampling={"regex": "a"}),
            "regex: needs an orchestrator",
        ),
        (pb.GenerateRequest(tokens=pb.TokenIds(ids=PROMPT), sampling={"top_p": 2}), "top_p: "),
        (pb.GenerateRequest(tokens=pb.TokenIds(ids=PROMPT), stop=[""]), "stop: string 0 has 0 characters"),
        (pb.GenerateRequest(tokens=pb.TokenIds(ids=PROMPT), priority=101), "priority: "),
        (pb.GenerateRequest.FromString(b"\xf8\x7f\x01"), "request: holds field number 2047"),
        (
            pb.GenerateRequest.FromString(b"\x12\x03\x0a\x01\x05\x1a\x03\xf8\x7f\x01"),
            "sampling: holds field number 2047",
        ),
    ],
)
async def test_what_is_refused_is_named(request_: pb.GenerateRequest, message: str) -> None:
    async with serving(MODEL, context=8) as running, grpc.aio.insecure_channel(running.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request_, timeout=LIMIT_S).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(message)


async def test_what_a_drafter_has_not() -> None:
    async with drafter(MODEL) as (_, client):
        info = await client.server_info()
        assert [each.model for each in info.targets] == [info.target.model] == ["scripted:7"]
        assert (info.target.tokenizer_json, info.target.host_id, info.durability) == (b"", "", "")
        with pytest.raises(SpecwireError, match="NOT_FOUND: model: 'other' is not served here; 'scripted:7' is"):
            await client.complete(PROMPT, model="other")
        with pytest.raises(SpecwireError, match="UNIMPLEMENTED: a drafter keeps no sessions"):
            await client.get_session("x")
        with pytest.raises(SpecwireError, match="UNIMPLEMENTED: a drafter scores no texts"):
            await client.score_text([1], [[[2]]])


async def test_drafting_goes_on_unchanged_beside_texts() -> None:
    """Prompts and all: a forward that drafts feeds few rows of them."""
    expected = continuation(MODEL, PROMPT, 12)
    prompts = [[*(token % 64 for token in range(400)), at] for at in range(6)]
    async with drafter(SLOW, slots=8) as (running, client), connected(running) as peer:
        texts = [asyncio.create_task(client.complete(prompt, max_tokens=30, ignore_eos=True)) for prompt in prompts]
        await until(lambda: texts_of(running) == {"running": 6, "waiting": 0})
        await peer.open(1, PROMPT, pace(4, 12))
        assert [tokens_of(await peer.proposal(1)) for _ in range(3)] == [expected[:4], expected[4:8], expected[8:]]
        await peer.advance(1, len(PROMPT), [*expected[:2], 63], pace(4, 4))
        assert tokens_of(await peer.proposal(1)) == continuation(MODEL, [*PROMPT, *expected[:2], 63], 4)
        written = await asyncio.gather(*texts)
    assert [list(text.tokens) for text in written] == [continuation(MODEL, prompt, 30) for prompt in prompts]


async def test_a_session_takes_the_slot_of_a_text_which_goes_on_later() -> None:
    """Its prompt and what was written are fed again in another slot: the text is what it would have been."""
    sampling = Sampling(temperature=0.7, seed=3)
    async with drafter(SLOW, slots=1) as (running, client), connected(running) as peer:
        writing = client.generate(PROMPT, max_tokens=100, temperature=0.7, seed=3, ignore_eos=True)
        events = [await anext(writing), await anext(writing)]
        await peer.open(1, PROMPT, pace(4, 4))
        assert tokens_of(await peer.proposal(1)) == continuation(MODEL, PROMPT, 4)
        assert texts_of(running) == {"running": 0, "waiting": 1}
        await peer.close(1)
        events += [event async for event in writing]
    tokens = [token for event in events if isinstance(event, Chunk) for token in event.tokens]
    assert tokens == continuation(MODEL, PROMPT, 100, sampling)


async def test_texts_wait_for_a_slot_and_the_greater_priority_goes_first() -> None:
    ended: list[int] = []

    async def write(client: AsyncClient, priority: int) -> None:
        await client.complete(PROMPT, max_tokens=3, ignore_eos=True, priority=priority)
        ended.append(priority)

    async with drafter(SLOW, slots=1) as (running, client):
        first = client.generate(PROMPT, ignore_eos=True)
        assert isinstance(await anext(first), Started)
        await until(lambda: texts_of(running)["running"] == 1)
        tasks = [asyncio.create_task(write(client, priority)) for priority in (0, 2, 1)]
        await until(lambda: texts_of(running)["waiting"] == 3)
        await first.aclose()
        await asyncio.gather(*tasks)
    assert ended == [2, 1, 0]


async def test_leaving_frees_the_slot_also_of_one_that_waits() -> None:
    async with drafter(SLOW, slots=1) as (running, client):
        first, second = (client.generate(PROMPT, ignore_eos=True) for _ in range(2))
        for each in (first, second):
            assert isinstance(await anext(each), Started)
        await until(lambda: texts_of(running) == {"running": 1, "waiting": 1})
        await second.aclose()
        await until(lambda: texts_of(running) == {"running": 1, "waiting": 0})
        await first.aclose()
        await until(lambda: texts_of(running) == {"running": 0, "waiting": 0})
        assert len((await client.complete(PROMPT, max_tokens=3, ignore_eos=True)).tokens) == 3


@pytest.mark.parametrize("taken", [False, True], ids=["while it is written", "while it waits"])
async def test_a_deadline_ends_a_text(taken: bool) -> None:
    async with drafter(SLOW, slots=1) as (running, client), connected(running) as peer:
        if taken:
            await peer.open(1, PROMPT, pace(1, 1))
            await peer.proposal(1)
        with pytest.raises(SpecwireError, match="DEADLINE_EXCEEDED"):
            await client.complete(PROMPT, ignore_eos=True, timeout=0.3)
        await until(lambda: texts_of(running) == {"running": 0, "waiting": 0})


async def test_too_many_texts_are_refused_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MOST_TEXTS", 1)
    async with drafter(SLOW) as (running, client):
        first = client.generate(PROMPT, ignore_eos=True)
        assert isinstance(await anext(first), Started)
        with pytest.raises(SpecwireError, match="RESOURCE_EXHAUSTED: 1 texts are being written or wait"):
            await client.complete(PROMPT)
        async with asking(running, patience=LIMIT_S) as patient:
            await patient.server_info()
            again = asyncio.create_task(patient.complete(PROMPT, max_tokens=3, ignore_eos=True))
            done, _ = await asyncio.wait({again}, timeout=0.2)
            assert not done
            await first.aclose()
            assert len((await again).tokens) == 3


class Caller:
    """A call's context; events are taken from the generator, or not."""

    def invocation_metadata(self) -> tuple[()]:
        return ()


async def test_who_does_not_read_keeps_neither_slot_nor_memory_nor_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async with drafter(SLOW, slots=1) as (running, client):
        request = pb.GenerateRequest(tokens=pb.TokenIds(ids=PROMPT), stopping={"ignore_eos": True})
        events = running._generation.Generate(request, cast(Context, Caller()))
        assert (await anext(events)).HasField("started")
        assert (await anext(events)).HasField("chunk")
        # Only now: on a busy machine more may wait before it reads for the first time.
        monkeypatch.setattr(generation, "MOST_UNREAD", 8)
        await until(lambda: not running._generation._streams)
        assert len((await client.complete(PROMPT, max_tokens=3, ignore_eos=True)).tokens) == 3
        with pytest.raises(StatusError, match="the caller does not read: more than 8 tokens of its text wait for it"):
            await anext(events)


async def test_a_tokenizer_is_read_once_however_many_ask(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    read = list[int]()

    def counted(text: bytes) -> Tokenizer:
        read.append(len(text))
        return load_tokenizer(text)

    monkeypatch.setattr(generation, "load_tokenizer", counted)
    async with drafter(folder) as (_, client):
        asked = (client.complete("a", max_tokens=1, ignore_eos=True) for _ in range(8))
        assert len(await asyncio.gather(*asked)) == 8
    assert len(read) == 1


async def test_a_stopping_drafter_lets_texts_end_and_takes_no_more() -> None:
    async with drafter(SLOW) as (running, client):
        text = asyncio.create_task(client.complete(PROMPT, max_tokens=60, ignore_eos=True))
        await until(lambda: texts_of(running)["running"] == 1)
        stopping = asyncio.create_task(running.stop(LIMIT_S))
        await asyncio.sleep(0)
        with pytest.raises(SpecwireError, match="UNAVAILABLE"):
            await client.complete(PROMPT)
        assert len((await text).tokens) == 60
        await stopping


async def test_a_text_that_outlives_the_grace_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has patience, but a drafter's text cannot be resumed. Other work comes before its last words."""
    take = generation.TextStream.next

    async def late(stream: generation.TextStream) -> list[Written]:
        try:
            return await take(stream)
        except StatusError:
            for _ in range(100):
                await asyncio.sleep(0)
            raise

    monkeypatch.setattr(generation.TextStream, "next", late)
    async with serving(SLOW) as running, asking(running, patience=LIMIT_S) as client:
        text = client.generate(PROMPT, ignore_eos=True)
        assert isinstance(await anext(text), Started)
        assert isinstance(await anext(text), Chunk)
        stopping = asyncio.create_task(running.stop(0.0))
        with pytest.raises(SpecwireError, match="UNAVAILABLE: the drafter is stopping"):
            async for _ in text:
                pass
        await stopping


async def test_who_may_call_is_asked_as_for_drafting(folder: str) -> None:
    keys = Keys({"a-token-of-length-16": "rag"})
    running = await start(ModelServiceOptions(MODEL, keys=keys))
    try:
        async with asking(running) as client:
            with pytest.raises(SpecwireError, match="UNAUTHENTICATED"):
                await client.complete(PROMPT)
        async with asking(running, token="a-token-of-length-16") as client:
            assert len((await client.complete(PROMPT, max_tokens=3)).tokens) == 3
    finally:
        await running.stop()


async def test_the_demo_drafter_writes_code() -> None:
    async with drafter(str(demo_pair.DRAFT), slots=2) as (_, client):
        written: Completion = await client.complete("def add(a, b):\n    return", max_tokens=12, stop=["\n"])
    assert written.text.strip()
    tokens = AutoTokenizer.from_pretrained(demo_pair.DRAFT).encode("def add(a, b):\n    return")
    expected = own_greedy(str(demo_pair.DRAFT), tokens, 12)
    assert expected[: len(written.tokens)] == list(written.tokens)
