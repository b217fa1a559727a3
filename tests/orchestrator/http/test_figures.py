"""What is told beside a text: log-probabilities of prompts, and what speculation did."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_pair import TARGET as DEMO
from orchestrator.http.openai.answers import by_source, metrics_of, total, usage_of
from orchestrator.peers.peer import VerifierPeer
from orchestrator.tenants import Access
from specwire.v1 import generation_pb2 as pb
from specwire.v1 import verify_pb2
from tests.orchestrator.http.front import CHAT, COMPLETIONS, IDS, SAYS, Front, another, front
from tests.orchestrator.stack import PROMPT, TARGET, plain
from tests.wait import asked_blocking

# ----------------------------------------------------------------------------------------------------------------------
# Log-probabilities of prompts, against transformers' own, and as lm-evaluation-harness asks for them.

STORY = "Once upon a time there was a little fox. It lived in a"
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
    ids = ids_of(reference, STORY)
    log_p = expected(reference, ids)
    body = {"max_tokens": 4, "temperature": 0, "echo": True, "logprobs": TOP}
    for prompt in (STORY, ids, STORY):
        choice = demo.done(COMPLETIONS, prompt=prompt, **body)["choices"][0]
        told = choice["logprobs"]
        assert choice["text"].startswith(STORY)
        assert len(told["tokens"]) == len(ids) + 4
        assert "".join(told["tokens"]) == choice["text"]
        assert told["text_offset"] == [len("".join(told["tokens"][:index])) for index in range(len(told["tokens"]))]
        check(told, ids, log_p, TOP)


def test_nothing_is_generated_where_max_tokens_is_0(demo: Front, reference: tuple[Any, Any]) -> None:
    texts = [STORY, OTHER]
    answer = demo.done(COMPLETIONS, prompt=texts, max_tokens=0, echo=True, logprobs=1, n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for choice, text in zip(answer["choices"], (STORY, STORY, OTHER, OTHER), strict=True):
        ids = ids_of(reference, text)
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert len(choice["logprobs"]["tokens"]) == len(ids)
        check(choice["logprobs"], ids, expected(reference, ids), 1)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (sum(len(ids_of(reference, t)) for t in texts), 0)
    plain = demo.done(COMPLETIONS, prompt=STORY, max_tokens=0)["choices"][0]
    assert (plain["text"], plain["logprobs"]) == ("", None)


def test_a_stream_brings_them_with_the_echo(demo: Front, reference: tuple[Any, Any]) -> None:
    body: dict[str, Any] = {"prompt": STORY, "temperature": 0, "echo": True, "logprobs": 2}
    for tokens in (0, 3):
        whole = demo.done(COMPLETIONS, max_tokens=tokens, **body)["choices"][0]
        events = [event["choices"][0] for event in demo.events(COMPLETIONS, max_tokens=tokens, **body)]
        told = [choice["logprobs"] for choice in events if choice["logprobs"]]
        assert "".join(choice["text"] for choice in events) == whole["text"]
        assert [each for part in told for each in part["tokens"]] == whole["logprobs"]["tokens"]
        assert [each for part in told for each in part["token_logprobs"]] == whole["logprobs"]["token_logprobs"]


def test_vllms_form(demo: Front, reference: tuple[Any, Any]) -> None:
    """For each token the most probable ids and its own, by id, with rank and text."""
    ids = ids_of(reference, STORY)
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
    body = {"prompt": [STORY, OTHER], "max_tokens": 0, "echo": True, "logprobs": 1}
    for more in ({"request_id": "one"}, {"request_id": "one"}, {"request_id": "two"}, {}):
        demo.done(COMPLETIONS, **body, **more)
    first, again, *others = zip(named[::2], named[1::2], strict=True)  # of its two prompts
    assert first == again
    assert len({first, *others}) == 3
    assert all(named)


def test_limits_and_deadlines(demo: Front) -> None:
    body = {"prompt": STORY, "max_tokens": 0, "echo": True, "logprobs": 1}
    assert demo.post(COMPLETIONS, timeout=1e-6, **body).status_code == 504
    too_long = demo.post(COMPLETIONS, **{**body, "prompt": [5] * 5000})
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    with another(demo, access=Access(tokens_per_minute=30)) as limited:
        codes = [limited.post(COMPLETIONS, **body).status_code for _ in range(3)]
    assert codes[0] == 200
    assert codes[-1] == 429


# ----------------------------------------------------------------------------------------------------------------------
# What speculation did for a request, as others' tools read it, and which sources a request lets propose.

TOKENS = 60
ASKED: dict[str, Any] = {"prompt": IDS, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
SPOKEN: dict[str, Any] = {**ASKED, "messages": [SAYS]}
del SPOKEN["prompt"]
WHOLE = " ".join(map(str, plain(TARGET, PROMPT, TOKENS)))
KINDS = {"drafters", "ngram", "heads", "prediction"}


def drafted(door: Front, **more: Any) -> dict[str, Any]:
    """An answer in which draft tokens of windows were accepted; its text is that of plain decoding in any case."""

    def ask() -> dict[str, Any]:
        answer = door.done(COMPLETIONS, **ASKED, **more)
        assert answer["choices"][0]["text"] == WHOLE
        return answer

    return asked_blocking(ask, lambda told: told["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0)


def aiperf_takes(told: dict[str, Any]) -> bool:
    """Its checks of a request's figures, of which it drops all where one fails (its SpecDecodeAcceptanceRecord)."""
    histogram, floats = told["acceptance_histogram"], (told["mean_acceptance_length"], told["draft_acceptance_rate"])
    return (
        all(isinstance(each, float) for each in floats)
        and len(histogram) == told["num_spec_tokens"] + 1
        and sum(histogram) == told["num_spec_steps"]
        and sum(place * count for place, count in enumerate(histogram)) == told["num_accepted_draft_tokens"]
        and told["num_accepted_draft_tokens"] <= told["num_draft_tokens"]
    )


def test_usage_and_metrics_say_the_same(door: Front) -> None:
    body = door.done(COMPLETIONS, **ASKED)
    told, stats = body["usage"]["speculative_decoding"], body["choices"][0]["specwire"]["stats"]
    details, metrics = body["usage"]["completion_tokens_details"], body["metrics"]["speculative_decoding"]
    for name in ("proposed", "tested", "accepted"):
        assert told[name] == stats[name]
        assert told[name] == sum(source[name] for source in told["sources"].values())
    assert set(told["sources"]) == KINDS
    assert told["target_forwards"] == stats["target_forwards"]
    assert details["accepted_prediction_tokens"] == told["accepted"] >= metrics["num_accepted_draft_tokens"]
    assert details["rejected_prediction_tokens"] == told["proposed"] - told["accepted"]
    assert aiperf_takes(metrics)
    # What is not in windows came during a forward, and was judged at once.
    late = told["tested"] - sum(stats["tested_at"])
    assert metrics["num_draft_tokens"] == told["proposed"] - late


@pytest.mark.parametrize(("path", "asked"), [(COMPLETIONS, ASKED), (CHAT, SPOKEN)])
def test_a_stream_says_it_with_its_usage(door: Front, path: str, asked: dict[str, Any]) -> None:
    *_, last = door.events(path, stream_options={"include_usage": True}, **asked)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == TOKENS
    told = last["usage"]["speculative_decoding"]
    assert aiperf_takes(last["metrics"]["speculative_decoding"])
    assert last["metrics"]["speculative_decoding"]["num_draft_tokens"] <= told["proposed"]


def test_a_request_chooses_its_sources(door: Front) -> None:
    """The text is the same whoever proposes."""
    prediction = {"type": "content", "content": WHOLE}
    for name, kind in (("drafters", "drafters"), ("ngram", "prediction")):
        answer = drafted(door, specwire={"sources": [name]}, prediction=prediction)
        sources = answer["usage"]["speculative_decoding"]["sources"]
        assert {each for each, counts in sources.items() if counts["proposed"]} == {kind}
    off = door.done(COMPLETIONS, specwire={"sources": []}, **ASKED)
    assert off["usage"]["speculative_decoding"]["proposed"] == 0
    assert off["metrics"]["speculative_decoding"]["acceptance_histogram"] == [0]
    assert aiperf_takes(off["metrics"]["speculative_decoding"])
    assert off["choices"][0]["text"] == WHOLE
    assert door.done(COMPLETIONS, specwire={}, **ASKED)["choices"][0]["text"] == WHOLE


def benchmark_reading(page: str) -> dict[str, int]:
    """As vLLM's `bench serve` reads /metrics: lines by parts of their names, the last word as the value."""
    read = {"drafts": 0, "draft_tokens": 0, "accepted": 0}
    for line in filter(lambda line: line.startswith("vllm:spec_decode"), page.splitlines()):
        value = int(float(line.split()[-1]))
        if "num_drafts" in line:
            read["drafts"] += value
        elif "num_draft_tokens" in line:
            read["draft_tokens"] += value
        elif "num_accepted_tokens_per_pos" in line:
            place = re.search(r'position="(\d+)"', line)
            assert place is not None
            read[f"at {place.group(1)}"] = read.get(f"at {place.group(1)}", 0) + value
        elif "num_accepted_tokens" in line:
            read["accepted"] += value
    return read


def test_vllms_benchmark_reads_its_counters(door: Front) -> None:
    """They rise by what the requests between two readings say, and equal ours."""
    before = benchmark_reading(door.client.get("/metrics").text)
    told = drafted(door)["metrics"]["speculative_decoding"]
    page = door.client.get("/metrics").text
    after = benchmark_reading(page)
    assert after["accepted"] - before["accepted"] >= told["num_accepted_draft_tokens"] > 0
    assert after["draft_tokens"] - before["draft_tokens"] >= told["num_draft_tokens"]
    assert after["drafts"] > before["drafts"]
    assert after["at 0"] > before.get("at 0", 0)
    ours = re.findall(r"^specwire:spec_decode_num_accepted_tokens_total\{.*\} (\S+)$", page, re.MULTILINE)
    assert sum(map(float, ours)) >= after["accepted"]


counts = st.integers(0, 1000)


@given(st.lists(st.tuples(counts, counts, counts, counts, counts), min_size=1, max_size=4))
def test_sums_hold_for_any_figures(rows: list[tuple[int, int, int, int, int]]) -> None:
    """The sources' counts add up to all, and a histogram to its windows."""
    stats = []
    for first, second, third, more, late in rows:
        # In windows of two: so many were tested first, of these so many accepted. Late: right, but in none.
        tested, accepted = first + second + third, second + third
        stats.append(
            pb.Stats(
                proposed=2 * tested + more + late,
                tested=tested + accepted + late,
                accepted=accepted + third + late,
                accepted_ngram=third,
                tested_ngram=third,
                proposed_ngram=third,
                tested_at=[tested, accepted] if accepted else [tested],
                accepted_at=[accepted, third] if accepted else [0],
            )
        )
    whole, sources = total(stats), by_source(stats)
    assert [sum(each[index] for each in sources.values()) for index in range(3)] == list(whole)
    told = metrics_of(stats)["speculative_decoding"]
    assert aiperf_takes(told)
    assert told["num_spec_steps"] == sum(sum(row[:3]) for row in rows)
    accepted = told["num_accepted_draft_tokens"] + sum(late for *_, late in rows)
    assert usage_of(stats, 1, predicted=False)["completion_tokens_details"]["accepted_prediction_tokens"] == accepted
