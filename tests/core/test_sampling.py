"""From logits to log-probabilities: against transformers' processors, against cases by hand, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specwire.core.invalid import InvalidParameter
from specwire.core.law.sampling import (
    History,
    LogprobsOf,
    Rule,
    Sampling,
    adjusted,
    check_bias_ids,
    kept_by_top_p,
    log_probabilities,
    resolve_rule,
    seen_in,
)

LOGITS = np.log([0.5, 0.25, 0.125, 0.125])


def by_transformers(logits: list[float], sampling: Sampling) -> list[float]:
    scores = torch.tensor([logits], dtype=torch.float64)
    ids = torch.zeros((1, 1), dtype=torch.long)
    scores = TemperatureLogitsWarper(sampling.temperature)(ids, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(ids, scores)  # type: ignore[arg-type]  # says LongTensor, means ids
    return [float(value) for value in torch.log_softmax(scores, dim=-1)[0]]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(-4000, 4000), min_size=2, max_size=12, unique=True),
    st.floats(0.2, 3.0),
    st.integers(0, 12),
    st.sampled_from([0.1, 0.37, 0.71, 0.93, 1.0]),
    st.sampled_from([0.0, 0.0301, 0.517]),
)
def test_equals_transformers(units: list[int], temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Distinct logits and a top_p that no partial sum hits: there the two define the same filters."""
    logits = [unit / 512 for unit in units]
    sampling = Sampling(temperature, top_k, top_p, min_p=min_p)
    np.testing.assert_allclose(log_probabilities(logits, sampling), by_transformers(logits, sampling), atol=1e-9)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.floats(-9, 9, width=32), min_size=8, max_size=8),
    st.lists(st.integers(0, 7), min_size=1, max_size=12),
    st.sampled_from([0.5, 1.0, 1.3]),
    st.dictionaries(st.integers(0, 7), st.floats(-5, 5), max_size=3),
    st.integers(0, 4),
)
def test_adjusts_as_transformers_does_and_in_its_order(
    logits: list[float], text: list[int], penalty: float, bias: dict[int, float], least: int
) -> None:
    """Sequence bias, repetition penalty, minimum length: the order of GenerationMixin._get_logits_processor."""
    prompt_length, end_id = 1, 7
    ids, scores = torch.tensor([text]), torch.tensor([logits], dtype=torch.float64)
    if bias:
        scores = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})(ids, scores)  # type: ignore[arg-type]  # takes both forms
    if penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(penalty)(ids, scores)
    if least:
        scores = MinNewTokensLengthLogitsProcessor(prompt_length, least, end_id)(ids, scores)
    sampling = Sampling(repetition_penalty=penalty, logit_bias=tuple(sorted(bias.items())))
    seen = History(text[:prompt_length], text[prompt_length:]).seen()
    banned = (end_id,) if len(text) - prompt_length < least else ()
    np.testing.assert_allclose(adjusted(logits, sampling, seen, banned), scores[0].numpy(), atol=1e-6)


def test_presence_and_frequency_look_at_the_output_only() -> None:
    seen = History([0, 0, 1], [1, 2, 2]).seen([2, 3])
    assert dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True)) == {0: 0, 1: 1, 2: 3, 3: 1}
    both = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    assert adjusted([4.0, 4.0, 4.0, 4.0, 4.0], both, seen).tolist() == [4.0, 3.25, 2.75, 3.25, 4.0]


def test_a_history_counts_as_the_text_does_however_long() -> None:
    history, output = History([5, 5, 900]), [(7 * index) % 613 for index in range(2000)]
    for start in range(0, 2000, 100):
        history.extend(output[start : start + 100])
    ids, counts = history.seen([900, 1000])
    expected = {token: [*output, 900, 1000].count(token) for token in {5, 900, 1000, *output}}
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == expected
    ids, counts = seen_in([5, 5, 900, *output, 900, 1000], 3)
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == expected


def test_top_k_keeps_ties_with_the_last_one_kept() -> None:
    np.testing.assert_allclose(np.exp(log_probabilities(LOGITS, Sampling(1.0, top_k=3))), [0.5, 0.25, 0.125, 0.125])


@pytest.mark.parametrize("top_k", [0, 4, 5, 1000])
def test_top_k_zero_or_beyond_the_vocabulary_is_off(top_k: int) -> None:
    np.testing.assert_allclose(np.exp(log_probabilities(LOGITS, Sampling(1.0, top_k=top_k))), np.exp(LOGITS))


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.01, [True, False, False, False]),
        (0.5, [True, False, False, False]),
        (0.500001, [True, True, False, False]),
        (0.75, [True, True, False, False]),
        (0.8, [True, True, True, False]),
        (0.9, [True, True, True, True]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: list[bool]) -> None:
    """Masses are sums of powers of two, hence exact; of the two equal last ones the lower id goes first."""
    assert kept_by_top_p(np.array([0.5, 0.25, 0.125, 0.125]), top_p).tolist() == kept
    assert (log_probabilities(LOGITS, Sampling(1.0, top_p=top_p)) > -np.inf).tolist() == kept


def test_greedy_gives_the_raw_distribution() -> None:
    """At temperature 0 the filters change no argmax, so they are not applied."""
    np.testing.assert_allclose(np.exp(log_probabilities(LOGITS, Sampling(0.0, top_k=1, top_p=0.1))), np.exp(LOGITS))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_masked_ids_stay_masked_and_large_logits_do_not_overflow(temperature: float) -> None:
    probabilities = np.exp(log_probabilities([1e4, -np.inf, 1e4], Sampling(temperature)))
    np.testing.assert_allclose(probabilities, [0.5, 0.0, 0.5])


@pytest.mark.parametrize(
    ("field", "parameters"),
    [
        ("temperature", {"temperature": math.nan}),
        ("temperature", {"temperature": math.inf}),
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": 100.5}),
        ("top_k", {"top_k": -1}),
        ("top_p", {"top_p": 0.0}),
        ("top_p", {"top_p": 1.01}),
        ("top_p", {"top_p": math.nan}),
        ("seed", {"seed": -1}),
        ("seed", {"seed": 2**64}),
        ("choice", {"choice": -1}),
        ("choice", {"choice": 2**32}),
    ],
)
def test_invalid_parameters_name_field_and_value(field: str, parameters: dict[str, float]) -> None:
    with pytest.raises(InvalidParameter) as caught:
        Sampling(**parameters)  # type: ignore[arg-type] # one of them has the wrong value on purpose
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert str(next(iter(parameters.values()))) in str(caught.value)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"min_p": 1.5}, "min_p: must be from 0 to 1, not 1.5"),
        ({"min_p": math.nan}, "min_p: must be from 0 to 1, not nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: must be from 0.01 to 100, not 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty: must be from 0.01 to 100, not inf"),
        ({"presence_penalty": -2.5}, "presence_penalty: must be from -2 to 2, not -2.5"),
        ({"frequency_penalty": 3.0}, "frequency_penalty: must be from -2 to 2, not 3.0"),
        ({"logprobs": 21}, "logprobs: must be from 0 to 20, not 21"),
        ({"logprobs_of": LogprobsOf.PROCESSED}, "logprobs_of: says what logprobs are of, which are not asked for"),
        ({"logit_bias": ((3, 101.0),)}, "logit_bias: must be from -100 to 100, not 101.0 (of id 3)"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "logit_bias: ids must rise from 0 and be distinct, not 3, 3"),
        ({"logit_bias": tuple((i, 0.0) for i in range(1025))}, "logit_bias: at most 1024 ids are allowed, not 1025"),
    ],
)
def test_options_out_of_range_are_refused_by_name_and_value(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        Sampling(**parameters)
    assert str(caught.value) == message


def test_a_bias_of_an_id_that_there_is_not_is_refused() -> None:
    check_bias_ids(Sampling(logit_bias=((1, 1.0), (9, 1.0))), 10)
    with pytest.raises(InvalidParameter, match=r"logit_bias: token id 10 is outside 0\.\.9"):
        check_bias_ids(Sampling(logit_bias=((1, 1.0), (10, 1.0))), 10)


@pytest.mark.parametrize("parameters", [{"temperature": 100.0}, {"seed": 2**64 - 1}, {"choice": 2**32 - 1}])
def test_the_bounds_themselves_are_valid(parameters: dict[str, float]) -> None:
    Sampling(**parameters)  # type: ignore[arg-type] # each key takes its own type


@pytest.mark.parametrize(("name", "temperature"), [("", 0.0), ("greedy", 0.0), ("", 0.5), ("coupled", 0.5)])
def test_rule_follows_the_temperature(name: str, temperature: float) -> None:
    assert resolve_rule(name, Sampling(temperature)) is (Rule.GREEDY if temperature == 0 else Rule.COUPLED)


@pytest.mark.parametrize(("name", "temperature"), [("greedy", 0.5), ("coupled", 0.0), ("magic", 0.0), ("GREEDY", 0.0)])
def test_a_rule_that_is_unknown_or_contradicts_is_refused(name: str, temperature: float) -> None:
    with pytest.raises(InvalidParameter, match="rule") as caught:
        resolve_rule(name, Sampling(temperature))
    assert name in str(caught.value)


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 9.9e-5])
def test_temperatures_just_above_zero_are_refused(temperature: float) -> None:
    with pytest.raises(InvalidParameter, match=r"temperature: must be 0 \(greedy\) or at least 0\.0001"):
        Sampling(temperature)
    assert Sampling(1e-4).rule is Rule.COUPLED
