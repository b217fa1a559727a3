"""Given texts scored through an orchestrator: against transformers' own figures, and within a tenant's limits."""

from __future__ import annotations

import asyncio
import itertools
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_pair import TARGET as DEMO
from orchestrator.peers.peer import VerifierPeer
from orchestrator.tenants import Access, Allowances
from specwire.client import AsyncClient, SpecwireError
from specwire.client.requests import Text, score_request
from specwire.rpc.errors import StatusError
from specwire.v1 import generation_pb2_grpc, verify_pb2
from tests.orchestrator.stack import PROMPT, SLOW_TARGET, stack
from tests.wait import LIMIT_S, asked, raised, until
from verify_service.engine.scoring import CHUNK_ROWS, Scorer, ScoringJob
from verify_service.usage import read_records, totals

PREFIX = "def total(values):\n"
CONTINUATIONS: list[list[Text]] = [
    ["    return", " sum(values)\n"],
    ["    result = 0\n", "    for value in values:\n", "        result += value\n"],
    [[5, 6, 7], "x"],
]


def reference_scores(parts: list[Text]) -> list[list[float]]:
    """Each part's log-probabilities by transformers, from a forward of the whole text."""
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO)
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    ids = [
        list(tokenizer.encode(part, add_special_tokens=False)) if isinstance(part, str) else list(part)
        for part in [PREFIX, *parts]
    ]
    whole = list(itertools.chain.from_iterable(ids))
    with torch.inference_mode():
        log_p = model(torch.tensor([whole])).logits[0].double().log_softmax(dim=1)
    at, scores = len(ids[0]), []
    for part in ids[1:]:
        scores.append([float(log_p[at + index - 1, token]) for index, token in enumerate(part)])
        at += len(part)
    return scores


async def test_scores_equal_transformers() -> None:
    async with stack(str(DEMO)) as parts:
        scores = await parts.client.score_text(PREFIX, CONTINUATIONS)
    for score, continuation in zip(scores, CONTINUATIONS, strict=True):
        expected = reference_scores(continuation)
        for part, values in zip(score.parts, expected, strict=True):
            assert part.logprobs == pytest.approx(values, abs=1e-4)
            assert part.logprob == pytest.approx(sum(values), abs=1e-3)
    assert scores[2].parts[0].tokens == (5, 6, 7)


@pytest.mark.parametrize(
    ("prefix", "continuations", "model", "code", "named"),
    [
        ((), [[PROMPT]], "", grpc.StatusCode.INVALID_ARGUMENT, "prefix: must not be empty"),
        (PROMPT, [], "", grpc.StatusCode.INVALID_ARGUMENT, "continuations: must be from 1 to 64, not 0"),
        (PROMPT, [[PROMPT]] * 65, "", grpc.StatusCode.INVALID_ARGUMENT, "from 1 to 64, not 65"),
        (PROMPT, [[PROMPT], []], "", grpc.StatusCode.INVALID_ARGUMENT, r"continuations\[1\].parts: must not be empty"),
        (PROMPT, [[PROMPT, ()]], "", grpc.StatusCode.INVALID_ARGUMENT, r"continuations\[0\].parts\[1\]: must not be"),
        (PROMPT, [[(64,)]], "", grpc.StatusCode.INVALID_ARGUMENT, r"parts\[0\]: token id 64 is outside 0..63"),
        (PROMPT, [[(1,) * 600]], "", grpc.StatusCode.INVALID_ARGUMENT, "one of 600 tokens behind a prefix of 3"),
        (PROMPT, [["x"] * 4000, ["x"] * 97], "", grpc.StatusCode.INVALID_ARGUMENT, "at most 4096 parts in all"),
        (PROMPT, [[PROMPT]], "gpt", grpc.StatusCode.NOT_FOUND, "model: 'gpt' is not served here"),
    ],
)
async def test_what_is_wrong_is_named(
    prefix: Text, continuations: list[list[Text]], model: str, code: grpc.StatusCode, named: str
) -> None:
    async with stack(context=512) as parts:
        with pytest.raises(SpecwireError, match=named) as raised:
            await parts.client.score_text(prefix, continuations, model=model)
        assert raised.value.code is code


async def test_all_tokens_are_charged_to_the_tenant() -> None:
    async with (
        stack(access=Access(tokens_per_minute=20)) as parts,
        AsyncClient(parts.orchestrator.address, patience=0) as client,
    ):
        await client.score_text(PROMPT, [[PROMPT]] * 5)  # 18
        with pytest.raises(SpecwireError, match="tokens a minute are used up") as raised:
            await client.score_text(PROMPT, [[PROMPT]])
        assert raised.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_score_waits_for_a_slot_until_its_deadline() -> None:
    async with stack(SLOW_TARGET, slots=1) as parts:
        running = asyncio.create_task(parts.client.complete(PROMPT, max_tokens=60))
        sessions = parts.orchestrator.orchestrator.sessions

        async def opened() -> bool:
            return any(each.view.stats.opened is not None for each in sessions.values())

        await asked(opened, bool)
        [score] = await parts.client.score_text(PROMPT, [[PROMPT]], timeout=LIMIT_S)
        assert len(score.parts[0].logprobs) == len(PROMPT)
        assert len((await running).tokens) == 60


async def test_a_call_counts_once_whoever_repeats_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The orchestrator, whose first answer is lost behind the verifier's record, and then the client."""
    file, score, lost = tmp_path / "usage", VerifierPeer.score, [True]

    async def losing(self: VerifierPeer, request: verify_pb2.ScoreRequest) -> verify_pb2.ScoreResponse:
        scored = await score(self, request)
        if lost:
            raise StatusError(grpc.StatusCode.UNAVAILABLE, f"lost: {lost.pop()}")
        return scored

    monkeypatch.setattr(VerifierPeer, "score", losing)
    request = score_request(PROMPT, [[PROMPT], [PROMPT[:1]]], "")
    async with stack(usage_log=file) as parts:
        async with grpc.aio.insecure_channel(parts.orchestrator.address) as channel:
            for _ in range(2):
                await generation_pb2_grpc.GenerationServiceStub(channel).ScoreText(request)
        await parts.client.score_text(PROMPT, [[PROMPT]])
    known = [record for record in read_records(file) if record is not None]
    assert len(known) == 4
    (usage,) = totals(known).values()
    first, second = 2 * len(PROMPT) + 1, 2 * len(PROMPT)
    assert (usage.sessions, usage.prompt_tokens, usage.decided) == (2, first + second, 0)
    assert usage.scored == len(PROMPT) + 1 + len(PROMPT)


async def test_a_score_whose_caller_leaves_is_charged_and_recorded_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was given back whole, and in no record, although a verifier had computed most of it."""
    file, chunks, advance = tmp_path / "usage", 0, Scorer._advance
    begun, left = threading.Event(), threading.Event()

    def held(scorer: Scorer, job: ScoringJob) -> Any:
        nonlocal chunks
        found = advance(scorer, job)
        chunks += 1
        if chunks == 2:
            begun.set()
            left.wait(LIMIT_S)
        return found

    charged: list[int] = []
    monkeypatch.setattr(Scorer, "_advance", held)
    monkeypatch.setattr(Allowances, "settle", lambda self, record, used, logged: charged.append(used))
    text = [3 + index % 40 for index in range(15 * CHUNK_ROWS)]
    async with stack(usage_log=file) as parts:
        asking = asyncio.create_task(parts.client.score_text(text[:2], [[text[2:]]]))
        await asyncio.to_thread(begun.wait, LIMIT_S)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: charged)
        left.set()
    assert charged == [len(text)]
    assert chunks <= 4
    (record,) = [each for each in read_records(file) if each is not None]
    assert (record.why, record.prompt_tokens, record.scored) == ("score left", len(text), 0)
    assert CHUNK_ROWS <= record.fed <= 4 * CHUNK_ROWS


async def test_what_no_verifier_computed_is_given_back() -> None:
    async def refused(self: VerifierPeer, request: verify_pb2.ScoreRequest) -> verify_pb2.ScoreResponse:
        raise StatusError(grpc.StatusCode.ABORTED, "not finite")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VerifierPeer, "score", refused)
        async with (
            stack(access=Access(tokens_per_minute=20)) as parts,
            AsyncClient(parts.orchestrator.address, patience=0) as client,
        ):
            for _ in range(5):
                await raised(SpecwireError, client.score_text(PROMPT, [[PROMPT]] * 5), "not finite")
            patch.undo()
            await client.score_text(PROMPT, [[PROMPT]] * 5)
