"""The demo's judgement: texts compared token for token, differences examined, figures added up."""

from __future__ import annotations

import json

import pytest

from deploy.cli.demo import Divergence, Pair, as_object, counts, examine, first_difference, report, tolerance
from specwire.client import Completion, SamplingInForce, Stats
from specwire.client.events import DrafterStats
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
        recovered=1,
        bonus=1,
        forwards_saved=2,
        time_to_first_token_us=3_000,
        duration_us=2_000_000,
    )
    return Pair("name", completion((1, 2, 3, 4), slow), completion(on, fast))


def test_report_adds_up() -> None:
    lines = report([pair((1, 2, 3, 4)), pair((1, 2, 3, 4))], []).splitlines()
    assert lines[-3].split() == ["all", "8", "1.0", "2.0", "2.00", "2.00", "0.67", "2", "3", "yes"]
    assert lines[-1] == "texts identical, token for token: 2 of 2"


def test_report_names_a_difference() -> None:
    parting = Divergence(7, (3, 9), (0.0, 2e-5), 1e-4)
    text = report([pair((1, 2, 9, 4))], [parting])
    assert "texts identical, token for token: 0 of 1" in text
    assert "position 7: tokens 3 and 9" in text
    assert text.endswith("a near-tie")
    assert "NO" in text


def test_the_same_for_scripts() -> None:
    parting = Divergence(7, (3, 9), (0.0, 2e-5), 1e-4)
    told = json.loads(json.dumps(as_object([pair((1, 2, 3, 4)), pair((1, 2, 9, 4))], [None, parting])))
    same, other = told["prompts"]
    assert (same["name"], same["identical"], same["parting"]) == ("name", True, None)
    assert (same["tokens"], same["ratio"], same["tokens_per_forward"]) == (4, 2.0, 2.0)
    assert (other["identical"], other["parting"]["tokens"], other["parting"]["near_tie"]) == (False, [3, 9], True)
    assert (told["all"]["tokens"], told["all"]["identical"]) == (8, False)
    assert told["all"]["acceptance"] == 2 / 3


def test_counts() -> None:
    expected = "4 tokens: 2 accepted, 1 recovered, 1 bonus, 0 direct; 2 target forwards (2 saved)"
    assert counts(pair((1, 2, 3, 4)).on) == expected


def test_counts_tell_of_each_source() -> None:
    drafters = (DrafterStats(1, "one", 4, 1, "", 2), DrafterStats(2, "two", 3, 1, "", 1))
    copied = Stats(output_tokens=1, target_forwards=1, tested_ngram=4, accepted_ngram=3, drafters=drafters)
    told = counts(completion((1,), copied))
    assert told.startswith("1 token: 0 accepted (drafters 2 of 3, n-grams 3 of 4), 0 recovered")
    assert told.endswith("; 1 target forward (0 saved)")


def test_a_completion_without_tokens_divides_by_nothing() -> None:
    empty = completion((), Stats())
    assert report([Pair("none", empty, empty)], []).count("0.0") >= 2


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
    parting = examine(TARGET, "float32", text, (best, worst))
    assert (parting.position, parting.tokens) == (3, (best, worst))
    assert parting.gaps[0] == 0.0
    assert not parting.near_tie
    assert str(parting).endswith("NO near-tie")
    assert examine(TARGET, "float32", text, (best, best)).near_tie
