"""Log-probabilities of prompts over HTTP, against transformers' own, and as lm-evaluation-harness asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_pair import TARGET as DEMO
from orchestrator.api.scores import PromptScorer
from orchestrator.peers.peer import VerifierPeer
from orchestrator.sessions import Orchestrator
from orchestrator.tenants import ANONYMOUS, Access
from specwire.v1 import generation_pb2 as pb
from specwire.v1 import verify_pb2
from tests.orchestrator.http.front import COMPLETIONS, Front, another, front
from tests.orchestrator.stack import PROMPT, SLOW_TARGET, stack
from tests.wait import LIMIT_S, asked

TEXT = "Once upon a time there was a little fox. It lived in a"
OTHER = "The sun was warm and the"
TOP = 5


@pytest.fixture(scope="module")
def demo() -> Iterator[Front]:
    with front(str(DEMO)) as running:
        yield running


@pytest.fixture(scope="module")
def reference() -> tuple[Any, Any]:
    return AutoTokenizer.from_pretrained(DEMO), AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


def expected(reference: tuple[Any, Any], ids: list[int]) -> torch.Tensor:
    """float64 (tokens - 1, vocabulary): of the token behind each."""
    with torch.inference_mode():
        logits = reference[1](torch.tensor([ids])).logits[0, :-1]
    log_p: torch.Tensor = logits.double().log_softmax(dim=1)
    return log_p


def ids_of(reference: tuple[Any, Any], text: str) -> list[int]:
    found: list[int] = reference[0].encode(text, add_special_tokens=False)
    return found


def check(told: dict[str, Any], ids: list[int], log_p: torch.Tensor, top: int) -> None:
    """The first len(ids) entries are the prompt's."""
    count = len(ids)
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    own = log_p.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
    assert told["token_logprobs"][1:count] == pytest.approx(own.tolist(), abs=1e-4)
    for row, best, token, logprob in zip(
        log_p, told["top_logprobs"][1:count], told["tokens"][1:count], own, strict=True
    ):
        assert best[token] == pytest.approx(logprob.item(), abs=1e-4)
        values = sorted(best.values(), reverse=True)
        assert values[:top] == pytest.approx(row.topk(top).values.tolist(), abs=1e-4)
        assert len(values) == top + (logprob < row.topk(top).values[-1])


def test_echo_equals_transformers(demo: Front, reference: tuple[Any, Any]) -> None:
    """A text and its tokens; with tokens generated behind it, and again where the prefix is kept already."""
    ids = ids_of(reference, TEXT)
    log_p = expected(reference, ids)
    body = {"max_tokens": 4, "temperature": 0, "echo": True, "logprobs": TOP}
    for prompt in (TEXT, ids, TEXT):
        choice = demo.done(COMPLETIONS, prompt=prompt, **body)["choices"][0]
        told = choice["logprobs"]
        assert choice["text"].startswith(TEXT)
        assert len(told["tokens"]) == len(ids) + 4
        assert "".join(told["tokens"]) == choice["text"]
        assert told["text_offset"] == [len("".join(told["tokens"][:index])) for index in range(len(told["tokens"]))]
        check(told, ids, log_p, TOP)


def test_nothing_is_generated_where_max_tokens_is_0(demo: Front, reference: tuple[Any, Any]) -> None:
    texts = [TEXT, OTHER]
    answer = demo.done(COMPLETIONS, prompt=texts, max_tokens=0, echo=True, logprobs=1, n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for choice, text in zip(answer["choices"], (TEXT, TEXT, OTHER, OTHER), strict=True):
        ids = ids_of(reference, text)
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert len(choice["logprobs"]["tokens"]) == len(ids)
        check(choice["logprobs"], ids, expected(reference, ids), 1)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (sum(len(ids_of(reference, t)) for t in texts), 0)
    plain = demo.done(COMPLETIONS, prompt=TEXT, max_tokens=0)["choices"][0]
    assert (plain["text"], plain["logprobs"]) == ("", None)


def test_a_stream_brings_them_with_the_echo(demo: Front, reference: tuple[Any, Any]) -> None:
    body: dict[str, Any] = {"prompt": TEXT, "temperature": 0, "echo": True, "logprobs": 2}
    for tokens in (0, 3):
        whole = demo.done(COMPLETIONS, max_tokens=tokens, **body)["choices"][0]
        events = [event["choices"][0] for event in demo.events(COMPLETIONS, max_tokens=tokens, **body)]
        told = [choice["logprobs"] for choice in events if choice["logprobs"]]
        assert "".join(choice["text"] for choice in events) == whole["text"]
        assert [each for part in told for each in part["tokens"]] == whole["logprobs"]["tokens"]
        assert [each for part in told for each in part["token_logprobs"]] == whole["logprobs"]["token_logprobs"]


def test_vllms_form(demo: Front, reference: tuple[Any, Any]) -> None:
    """For each token the most probable ids and its own, by id, with rank and text."""
    ids = ids_of(reference, TEXT)
    log_p = expected(reference, ids)
    for top in (0, 3):
        choice = demo.done(COMPLETIONS, prompt=ids, max_tokens=1, temperature=0, prompt_logprobs=top)["choices"][0]
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        assert choice["logprobs"] is None
        for token, row, entries in zip(ids[1:], log_p, rest, strict=True):
            own = entries[str(token)]
            assert own["rank"] == 1 + int((row > row[token]).sum())
            assert own["logprob"] == pytest.approx(float(row[token]), abs=1e-4)
            assert own["decoded_token"] == reference[0].decode([token])
            assert len(entries) == (top if own["rank"] <= top else top + 1)


def test_a_repeated_request_asks_for_the_same_scores(demo: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it counts once in records of usage (tests/verify_service/test_usage.py)."""
    named: list[str] = []
    score = VerifierPeer.score

    async def noted(self: VerifierPeer, request: verify_pb2.ScoreRequest) -> verify_pb2.ScoreResponse:
        named.append(request.score_id)
        return await score(self, request)

    monkeypatch.setattr(VerifierPeer, "score", noted)
    body = {"prompt": [TEXT, OTHER], "max_tokens": 0, "echo": True, "logprobs": 1}
    for more in ({"request_id": "one"}, {"request_id": "one"}, {"request_id": "two"}, {}):
        demo.done(COMPLETIONS, **body, **more)
    first, again, *others = zip(named[::2], named[1::2], strict=True)  # of its two prompts
    assert first == again
    assert len({first, *others}) == 3
    assert all(named)


async def test_a_score_waits_for_a_slot() -> None:
    """The verifier refuses while a session has its only one; the orchestrator asks again."""
    async with stack(SLOW_TARGET, slots=1) as parts:
        orchestrator = parts.orchestrator.orchestrator
        target = orchestrator.pool.target_named("")
        request = pb.GenerateRequest(tokens=pb.TokenIds(ids=PROMPT))
        running = asyncio.create_task(parts.client.complete(PROMPT, max_tokens=60))
        await asked(lambda: opened(orchestrator), bool)
        scores = await PromptScorer(orchestrator).score(request, target, ANONYMOUS, 1, LIMIT_S)
        assert len(scores.logprobs) == len(PROMPT) - 1
        assert len((await running).tokens) == 60


async def opened(orchestrator: Orchestrator) -> bool:
    return any(each.view.stats.opened is not None for each in orchestrator.sessions.values())


def test_limits_and_deadlines(demo: Front) -> None:
    body = {"prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 1}
    assert demo.post(COMPLETIONS, timeout=1e-6, **body).status_code == 504
    too_long = demo.post(COMPLETIONS, **{**body, "prompt": [5] * 5000})
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    with another(demo, access=Access(tokens_per_minute=30)) as limited:
        codes = [limited.post(COMPLETIONS, **body).status_code for _ in range(3)]
    assert codes[0] == 200
    assert codes[-1] == 429


# What lm-evaluation-harness' `local-completions` sends for loglikelihood tasks (its tokens, or the texts), and how it
# reads the answer: the sum behind the context, and whether each token was the most probable one.


def harness_request(prompts: list[Any]) -> dict[str, Any]:
    return {"prompt": prompts, "max_tokens": 1, "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}


def harness_reading(choice: dict[str, Any], context: int) -> tuple[float, bool]:
    told = choice["logprobs"]
    greedy = True
    for token, top in zip(told["tokens"][context:-1], told["top_logprobs"][context:-1], strict=True):
        greedy = greedy and token == max(top, key=top.get)
    return sum(told["token_logprobs"][context:-1]), greedy


def name_of(door: Front) -> str:
    found: str = door.client.get("/v1/models").json()["data"][0]["id"]
    return found


def test_the_harness_reads_what_transformers_says(demo: Front, reference: tuple[Any, Any]) -> None:
    pairs = [(TEXT, " hole"), (TEXT, " big house"), (OTHER, " sky was blue.")]
    whole = [(ids_of(reference, context), ids_of(reference, context + more)) for context, more in pairs]
    body = {**harness_request([ids for _, ids in whole]), "model": name_of(demo)}
    choices = sorted(demo.done(COMPLETIONS, **body)["choices"], key=lambda choice: choice["index"])
    for (context, ids), choice in zip(whole, choices, strict=True):
        log_p = expected(reference, ids)[len(context) - 1 :]
        total = sum(float(row[token]) for row, token in zip(log_p, ids[len(context) :], strict=True))
        greedy = all(int(row.argmax()) == token for row, token in zip(log_p, ids[len(context) :], strict=True))
        read, most_probable = harness_reading(choice, len(context))
        assert read == pytest.approx(total, abs=1e-3)
        assert most_probable is greedy
