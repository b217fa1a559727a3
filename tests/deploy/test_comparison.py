"""The demo's judgement: texts compared token for token, differences examined, figures added up."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from demo_pair import DEMO_SEED
from demo_pair import TARGET as REAL
from deploy.cli.clients.demo import (
    Comparison,
    Demo,
    DemoPrompt,
    Divergence,
    Pair,
    as_object,
    counts,
    examine,
    first_difference,
    report,
    tolerance,
)
from deploy.stack.options import StackOptions
from specwire.client import Completion, SamplingInForce, Stats
from specwire.core.law.acceptance import choose
from specwire.core.law.sampling import Sampling
from specwire.core.messages import FinishReason, Outcome
from specwire.lm import Feed, load_model

TARGET = "scripted:7"


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


def compared(
    pairs: list[Pair], partings: list[Divergence | None] | None = None, temperature: float = 0.0
) -> Comparison:
    return Comparison(temperature, pairs, partings or [None] * len(pairs))


def test_report_adds_up() -> None:
    same = pair((1, 2, 3, 4))
    lines = report([compared([same, same]), compared([same], temperature=0.8)], headed=True).splitlines()
    head = ["temperature", "tokens/s", "off", "on", "gain", "per", "forward", "text", "head", "drafter"]
    assert lines[0].split() == head
    assert lines[2].split() == ["0", "1.0", "2.0", "2.00", "2.00", "0%", "25%", "25%"]
    assert lines[3].split() == ["0.8", "1.0", "2.0", "2.00", "2.00", "0%", "25%", "25%"]
    assert lines[-1] == "texts identical, token for token: 3 of 3"
    assert max(map(len, lines)) <= 80


def test_report_says_nothing_of_heads_where_there_is_none() -> None:
    told = report([compared([pair((1, 2, 3, 4))])], headed=False)
    assert "head" not in told
    assert told.splitlines()[2].split() == ["0", "1.0", "2.0", "2.00", "2.00", "0%", "25%"]


def test_report_names_a_difference() -> None:
    parting = Divergence(7, (3, 9), (0.0, 2e-5), 1e-4)
    text = report([compared([pair((1, 2, 9, 4))], [parting])], headed=True)
    assert "texts identical, token for token: 0 of 1" in text
    assert "position 7: tokens 3 and 9" in text
    assert text.endswith("a near-tie")


def test_the_same_for_scripts() -> None:
    parting = Divergence(7, (3, 9), (0.0, 2e-5), 1e-4)
    both = compared([pair((1, 2, 3, 4)), pair((1, 2, 9, 4))], [None, parting], 0.8)
    told = json.loads(json.dumps(as_object(both)))
    same, other = told["prompts"]
    assert told["temperature"] == 0.8
    assert (same["name"], same["identical"], same["parting"]) == ("name", True, None)
    assert (same["tokens"], same["ratio"], same["tokens_per_forward"]) == (4, 2.0, 2.0)
    assert (other["identical"], other["parting"]["tokens"], other["parting"]["near_tie"]) == (False, [3, 9], True)
    assert (told["all"]["tokens"], told["all"]["identical"]) == (8, False)
    assert told["all"]["acceptance"] == 2 / 3
    assert told["all"]["guessed"] == {"text": 0.0, "head": 0.25, "drafter": 0.25}


async def test_the_demo_prints_what_was_copied_and_what_the_head_guessed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each text, and of all texts of a temperature as parts of their tokens."""

    class Served:
        async def complete(self, _text: str, drafting: bool = True, **_: object) -> Completion:
            both = pair((1, 2, 3, 4))
            on = replace(both.on, stats=replace(both.on.stats, proposed=6, tested=4, accepted=3, accepted_ngram=1))
            return on if drafting else both.off

    monkeypatch.setattr("deploy.cli.clients.demo.SHOWN_TEXTS", 0)
    client: Any = Served()
    shown = Demo(client, StackOptions(TARGET, None, heads="head"), 4, as_json=False)
    assert await shown.run([DemoPrompt("one", "1 2"), DemoPrompt("two", "3 4")]) == 0
    printed = capsys.readouterr().out
    assert "head   head\n" in printed
    assert printed.count("[4 tokens, 2 forwards; guessed: text 1, head 1, drafter 1; tokens/s 1 off, 2 on]") == 4
    rows = [line.split() for line in printed.splitlines() if line.endswith("%")]
    assert [(row[0], row[-3:]) for row in rows] == [("0", ["25%"] * 3), ("0.8", ["25%"] * 3)]


async def test_the_demo_warms_up_both_ways_and_begins_each_pair_with_what_a_head_needs_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, bool, int]] = []

    class Served:
        async def complete(
            self, _text: str, drafting: bool = True, max_tokens: int = 0, seed: int = -1, **_: object
        ) -> Completion:
            asked.append((seed, drafting, max_tokens))
            return pair((1, 2, 3, 4)).on if drafting else pair((1, 2, 3, 4)).off

    monkeypatch.setattr("deploy.cli.clients.demo.SHOWN_TEXTS", 0)
    client: Any = Served()
    shown = Demo(client, StackOptions(TARGET, None, heads="head"), 4, as_json=False)
    assert await shown.run([DemoPrompt("a", "1"), DemoPrompt("b", "2")]) == 0
    of_pair = [(-1, True, 2), (DEMO_SEED, True, 4), (DEMO_SEED, False, 4)]
    other_way = [of_pair[0], of_pair[2], of_pair[1]]
    warming = [(DEMO_SEED + 1, True, 4), (DEMO_SEED + 1, False, 4)]
    assert asked == warming * 4 + (of_pair + other_way) * 2


def test_counts_tell_who_guessed() -> None:
    slow, fast = pair((1, 2, 3, 4)).off, pair((1, 2, 3, 4)).on
    expected = "4 tokens, 2 forwards; guessed: text 0, head 1, drafter 1; tokens/s 1 off, 2 on"
    assert counts(slow, fast, headed=True) == expected
    assert counts(slow, fast, headed=False) == expected.replace(" head 1,", "")
    copied = Stats(output_tokens=1, target_forwards=1, accepted=5, accepted_ngram=3, accepted_prediction=2)
    told = counts(slow, completion((1,), copied), headed=False)
    assert told.startswith("1 token, 1 forward; guessed: text 5, drafter 0;")


def test_a_completion_without_tokens_divides_by_nothing() -> None:
    empty = completion((), Stats())
    assert report([compared([Pair("none", empty, empty)])], headed=True).count("0.0") >= 2


@pytest.mark.parametrize(
    ("one", "other", "index"),
    [((1, 2), (1, 2), None), ((), (), None), ((0, 2), (1, 2), 0), ((1, 2, 3), (1, 2, 4), 2), ((1, 2), (1, 2, 3), 2)],
)
def test_first_difference(one: tuple[int, ...], other: tuple[int, ...], index: int | None) -> None:
    assert first_difference(one, other) == index


def test_tolerance_is_in_units_of_the_top_score_where_numbers_are_coarse() -> None:
    assert tolerance("float32", 1000.0) == 1e-4
    assert tolerance("bfloat16", 1.0) == 2 * 2**-7
    assert tolerance("bfloat16", -20.0) == 2 * 2**-3
    assert tolerance("bfloat16", 0.0) > 0.0


def test_examine_scores_both_tokens_by_the_target() -> None:
    text = [5, 6, 7]
    scores = load_model(TARGET, slots=1).forward([Feed(0, 0, text, 1)])[0]
    best, worst = int(scores.argmax()), int(scores[:64].argmin())
    parting = examine(TARGET, "float32", text, (best, worst), Sampling())
    assert (parting.position, parting.tokens) == (3, (best, worst))
    assert parting.gaps[0] == 0.0
    assert not parting.near_tie
    assert str(parting).endswith("NO near-tie")
    assert examine(TARGET, "float32", text, (best, best), Sampling()).near_tie


def test_examine_scores_by_the_runtime_that_serves() -> None:
    """Its rounding decides what is a tie there."""
    text, tokens = [5, 6, 7, 8, 9], (10, 11)
    scores = load_model(str(REAL), slots=1, runtime="openvino").forward([Feed(0, 0, text, 1)])[0]
    parting = examine(str(REAL), "float32", text, tokens, Sampling(), "openvino")
    assert parting.gaps == tuple(float(scores.max() - scores[token]) for token in tokens)
    assert parting.gaps != examine(str(REAL), "float32", text, tokens, Sampling()).gaps


def test_examine_scores_as_tokens_are_drawn() -> None:
    """Above temperature 0 the best score is that of the token that is drawn, and a gap is that of the noisy scores."""
    text, drawn = [5, 6, 7], Sampling(temperature=0.8, seed=3)
    logits = load_model(TARGET, slots=1).forward([Feed(0, 0, text, 1)])[0].numpy()
    token = choose(logits, len(text), drawn)
    assert token != int(logits.argmax())
    parting = examine(TARGET, "float32", text, (token, int(logits.argmax())), drawn)
    assert parting.gaps[0] == 0.0
    assert parting.gaps[1] > 0.0
    assert parting.tolerance == pytest.approx(1e-4 / 0.8)
    closer = np.array(logits)
    closer[token] -= 0.8 * (parting.gaps[1] + 1e-3)
    assert choose(closer, len(text), drawn) != token


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_where_texts_part_is_examined_in_the_dtype_that_the_verifier_tells(dtype: str) -> None:
    """Not in what `auto` means for this process: the verifier may be on another device."""

    class Served:
        async def server_info(self) -> object:
            return SimpleNamespace(target=SimpleNamespace(dtype=dtype, runtime="torch", quantization=""))

        async def get_session(self, _session_id: str) -> object:
            return SimpleNamespace(tokens=(5, 6, 7, 1, 2, 3, 4), prompt_tokens=3)

    client: Any = Served()
    demo = Demo(client, StackOptions(str(REAL), None, dtype="auto"), 4, as_json=True)
    parting = await demo._parting(pair((1, 9, 3, 4)))
    assert parting is not None
    assert (parting.position, parting.tokens) == (4, (2, 9))
    assert (parting.tolerance == tolerance("float32", 1.0)) == (dtype == "float32")
