"""The demo's judgement: texts compared token for token, figures added up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from demo_pair import DEMO_SEED
from deploy.cli.clients.demo import (
    Comparison,
    Demo,
    DemoPrompt,
    Pair,
    as_object,
    counts,
    report,
)
from deploy.stack.options import StackOptions
from specwire.client import Completion, SamplingInForce, Stats
from specwire.core.messages import FinishReason, Outcome
from specwire.v1 import common_pb2, generation_pb2

TARGET = "scripted:7"


class Served:
    """A client of a target whose texts drafting may not change, unless `served` says so. answer: of a request."""

    def __init__(self, answer: Callable[..., Completion], **served: Any) -> None:
        self._answer = answer
        self._served = common_pb2.GetModelInfoResponse(**{"dtype": "bfloat16", "deterministic": True, **served})

    async def server_info(self) -> generation_pb2.GetServerInfoResponse:
        return generation_pb2.GetServerInfoResponse(target=self._served)

    async def complete(self, text: str, **asked: Any) -> Completion:
        return self._answer(text, **asked)


def demo(served: Any, as_json: bool = False) -> Demo:
    return Demo(served, StackOptions(TARGET, None, heads="head"), 4, as_json)


@pytest.fixture(autouse=True)
def _none_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.cli.clients.demo.SHOWN_TEXTS", 0)


def completion(tokens: tuple[int, ...], stats: Stats) -> Completion:
    sampling = SamplingInForce(0.0, 0, 1.0, 0, "greedy")
    outcomes = (Outcome.DIRECT,) * len(tokens)
    return Completion("s", 1, sampling, "", tokens, outcomes, FinishReason.LENGTH, "", stats)


def pair(on: tuple[int, ...]) -> Pair:
    slow = Stats(output_tokens=4, target_forwards=4, direct=4, time_to_first_token_us=2_000, duration_us=4_000_000)
    fast = Stats(
        output_tokens=4,
        target_forwards=2,
        proposed=5,
        tested=3,
        accepted=2,
        accepted_head=1,
        recovered=1,
        bonus=1,
        forwards_saved=2,
        time_to_first_token_us=3_000,
        duration_us=2_000_000,
    )
    return Pair("name", completion((1, 2, 3, 4), slow), completion(on, fast))


def test_report_adds_up() -> None:
    same = pair((1, 2, 3, 4))
    lines = report([Comparison(0.0, [same, same]), Comparison(0.8, [same])], headed=True).splitlines()
    head = ["temperature", "tokens/s", "off", "on", "gain", "per", "forward", "text", "head", "drafter"]
    assert lines[0].split() == head
    assert lines[2].split() == ["0", "1.0", "2.0", "2.00", "2.00", "0%", "25%", "25%"]
    assert lines[3].split() == ["0.8", "1.0", "2.0", "2.00", "2.00", "0%", "25%", "25%"]
    assert lines[-1] == "texts identical, token for token: 3 of 3"
    assert max(map(len, lines)) <= 80
    told = report([Comparison(0.0, [pair((1, 2, 3, 4))])], headed=False)
    assert "head" not in told
    assert told.splitlines()[2].split() == ["0", "1.0", "2.0", "2.00", "2.00", "0%", "25%"]


def test_the_same_for_scripts() -> None:
    both = Comparison(0.8, [pair((1, 2, 3, 4)), pair((1, 2, 9, 4))])
    told = json.loads(json.dumps(as_object(both)))
    same, other = told["prompts"]
    assert told["temperature"] == 0.8
    assert (same["name"], same["identical"]) == ("name", True)
    assert (same["tokens"], same["ratio"], same["tokens_per_forward"]) == (4, 2.0, 2.0)
    assert not other["identical"]
    assert (told["all"]["tokens"], told["all"]["identical"]) == (8, False)
    assert told["all"]["acceptance"] == 2 / 3
    assert told["all"]["guessed"] == {"text": 0.0, "head": 0.25, "drafter": 0.25}


async def test_the_demo_prints_what_was_copied_and_what_the_head_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    """Of each text, and of all texts of a temperature as parts of their tokens."""

    def answer(_text: str, drafting: bool = True, **_: object) -> Completion:
        both = pair((1, 2, 3, 4))
        on = replace(both.on, stats=replace(both.on.stats, proposed=6, tested=4, accepted=3, accepted_ngram=1))
        return on if drafting else both.off

    assert await demo(Served(answer)).run([DemoPrompt("one", "1 2"), DemoPrompt("two", "3 4")]) == 0
    printed = capsys.readouterr().out
    assert "head   head\n" in printed
    assert printed.count("[4 tokens, 2 forwards; guessed: text 1, head 1, drafter 1; tokens/s 1 off, 2 on]") == 4
    rows = [line.split() for line in printed.splitlines() if line.endswith("%")]
    assert [(row[0], row[-3:]) for row in rows] == [("0", ["25%"] * 3), ("0.8", ["25%"] * 3)]


@pytest.mark.parametrize(
    ("served", "code", "told"),
    [
        ({"runtime": "openvino"}, 1, "error: texts that differ: b at 0.8; in bfloat16 on openvino drafting may change"),
        (
            {"dtype": "float32", "deterministic": False, "runtime": "torch"},
            1,
            "in float32 on torch drafting may change",
        ),
        ({"deterministic": False, "runtime": "torch"}, 0, "texts that differ: b at 0.8; in bfloat16 on torch guesses"),
        ({"dtype": "float32", "deterministic": False, "quantization": "int8"}, 0, "guesses may tip near-ties"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
async def test_a_text_that_drafting_may_not_change_fails_the_demo(
    served: dict[str, Any],
    code: int,
    told: str,
    as_json: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def answer(text: str, drafting: bool = True, temperature: float = 0, **_: object) -> Completion:
        changed = text == "2" and drafting and temperature > 0
        return pair((1, 2, 9, 4) if changed else (1, 2, 3, 4)).on

    asked = demo(Served(answer, **served), as_json)
    assert await asked.run([DemoPrompt("a", "1"), DemoPrompt("b", "2")]) == code
    printed = capsys.readouterr()
    assert told in printed.err
    assert ("error" in printed.err) is bool(code)
    if as_json:  # one object and nothing else
        found = json.loads(printed.out)
        assert (found["target"], found["draft"], found["head"], found["exact"]) == (TARGET, None, "head", bool(code))
        assert (found["dtype"], found["runtime"]) == (served.get("dtype", "bfloat16"), served.get("runtime", ""))
        assert [each["temperature"] for each in found["temperatures"]] == [0.0, 0.8]
        assert [[one["name"] for one in each["prompts"]] for each in found["temperatures"]] == [["a", "b"]] * 2


async def test_the_demo_warms_up_both_ways_and_begins_each_pair_with_what_a_head_needs_too() -> None:
    asked: list[tuple[int, bool, int]] = []

    def answer(_text: str, drafting: bool = True, max_tokens: int = 0, seed: int = -1, **_: object) -> Completion:
        asked.append((seed, drafting, max_tokens))
        return pair((1, 2, 3, 4)).on if drafting else pair((1, 2, 3, 4)).off

    await demo(Served(answer)).run([DemoPrompt("a", "1"), DemoPrompt("b", "2")])
    of_pair = [(-1, True, 2), (DEMO_SEED, True, 4), (DEMO_SEED, False, 4)]
    other_way = [of_pair[0], of_pair[2], of_pair[1]]
    warming = [(DEMO_SEED + 1, True, 4), (DEMO_SEED + 1, False, 4)]
    assert asked == warming * 4 + (of_pair + other_way) * 2


def test_counts_tell_who_guessed() -> None:
    slow, fast = pair((1, 2, 3, 4)).off, pair((1, 2, 3, 4)).on
    expected = "4 tokens, 2 forwards; guessed: text 0, drafter 1; tokens/s 1 off, 2 on"
    assert counts(slow, fast, headed=False) == expected
    copied = Stats(output_tokens=1, target_forwards=1, accepted=5, accepted_ngram=3, accepted_prediction=2)
    told = counts(slow, completion((1,), copied), headed=False)
    assert told.startswith("1 token, 1 forward; guessed: text 5, drafter 0;")
    # Without tokens nothing is divided by nothing.
    empty = completion((), Stats())
    assert report([Comparison(0.0, [Pair("none", empty, empty)])], headed=True).count("0.0") >= 2
