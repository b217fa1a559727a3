"""What speculation did for a request, as others' tools read it, and which sources a request lets propose."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.http.openai.answers import by_source, metrics_of, total, usage_of
from specwire.v1 import generation_pb2 as pb
from tests.orchestrator.http.front import CHAT, COMPLETIONS, Front
from tests.orchestrator.stack import PROMPT, TARGET, plain
from tests.wait import asked_blocking

TOKENS = 60
ASKED: dict[str, Any] = {"prompt": list(PROMPT), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
SPOKEN: dict[str, Any] = {**ASKED, "messages": [{"role": "user", "content": " ".join(map(str, PROMPT))}]}
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
