"""--speculative-config: other servers' words for what there is here, and the rest refused by name."""

from __future__ import annotations

import argparse
import json

import pytest

from deploy.stack.options import Speculative, speculative_of, stack_options
from specwire.core.invalid import InvalidParameter
from specwire.options import STACK, add_options


@pytest.mark.parametrize(
    ("config", "meant"),
    [
        ({}, Speculative()),
        ({"method": "ngram"}, Speculative(drafter=False, ngram=True)),
        ({"method": "ngram", "num_speculative_tokens": None}, Speculative(drafter=False, ngram=True)),
        ({"method": "draft_model", "model": "m"}, Speculative(True, False, "m")),
        ({"model": "m", "num_speculative_tokens": 5}, Speculative(True, False, "m", "lockstep:5")),
        ({"num_assistant_tokens": 4, "assistant_confidence_threshold": 0}, Speculative(plan="lockstep:4")),
        ({"num_assistant_tokens": 4, "num_speculative_tokens": 4}, Speculative(plan="lockstep:4")),
    ],
)
def test_what_means_the_same(config: dict[str, object], meant: Speculative) -> None:
    assert speculative_of(json.dumps(config)) == meant


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must be a JSON object, not '[1]'"),
        ("{", "must be a JSON object, not '{'"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"method": "eagle"}', 'method must be draft_model or ngram, not "eagle"'),
        ('{"model": 3}', "model must be a path or hub id, not 3"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens must be a whole number from 1 on, not 0"),
        ('{"num_speculative_tokens": true}', "num_speculative_tokens must be a whole number from 1 on, not true"),
        ('{"num_speculative_tokens": 9999}', "num_speculative_tokens plan: "),
        ('{"num_speculative_tokens": 3, "num_assistant_tokens": 4}', "num_assistant_tokens contradicts"),
        ('{"assistant_confidence_threshold": 0.4}', "assistant_confidence_threshold must be 0: no chain ends"),
        ('{"method": "ngram", "num_speculative_tokens": 5}', "num_speculative_tokens is a draft model's"),
        ('{"prompt_lookup_max": 4}', "prompt_lookup_max is not taken: what is looked up"),
        ('{"disable_by_batch_size": 8}', "disable_by_batch_size is not taken: whether drafting pays"),
        ('{"num_speculativ_tokens": 5}', "num_speculativ_tokens is not known; there are method, "),
    ],
)
def test_what_does_not_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        speculative_of(text)
    assert str(refused.value).startswith(f"speculative-config: {message}")


def options_of(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser, STACK)
    return parser.parse_args(words)


def test_a_stack_is_made_of_it() -> None:
    config = '{"model": "d", "num_speculative_tokens": 3}'
    options = stack_options(options_of("--target", "t", "--speculative-config", config))
    assert (options.draft, options.ngram, options.plan) == ("d", False, "lockstep:3")
    options = stack_options(options_of("--target", "t", "--speculative-config", '{"method": "ngram"}'))
    assert (options.draft, options.ngram, options.plan) == (None, True, "auto")


NUMBER, MODEL = '{"num_speculative_tokens": 4}', '{"model": "m"}'
DRAFT_METHOD, NGRAM_METHOD = '{"method": "draft_model"}', '{"method": "ngram"}'


@pytest.mark.parametrize(
    ("config", "words", "draft", "ngram", "plan"),
    [
        (NUMBER, ["--draft", "d"], "d", True, "lockstep:4"),
        (NUMBER, ["--draft", "d", "--no-ngram"], "d", False, "lockstep:4"),
        (DRAFT_METHOD, ["--draft", "d"], "d", False, "auto"),
        (DRAFT_METHOD, ["--draft", "d", "--no-ngram"], "d", False, "auto"),
        (NGRAM_METHOD, ["--no-draft"], None, True, "auto"),
        ("{}", ["--draft", "d", "--no-ngram"], "d", False, "auto"),
        ("{}", [], None, True, "auto"),
    ],
)
def test_flags_say_what_it_leaves_open(
    config: str, words: list[str], draft: str | None, ngram: bool, plan: str
) -> None:
    options = stack_options(options_of("--target", "t", "--speculative-config", config, *words))
    assert (options.draft, options.ngram, options.plan) == (draft, ngram, plan)


@pytest.mark.parametrize(
    ("config", "words", "message"),
    [
        (MODEL, ["--draft", "d"], "model says what --draft says, too"),
        (NGRAM_METHOD, ["--draft", "d"], "method ngram is without the drafter that --draft names"),
        (NUMBER, ["--no-draft"], "draft model contradicts --no-draft"),
        (DRAFT_METHOD, ["--no-draft"], "draft model contradicts --no-draft"),
        (NGRAM_METHOD, ["--no-ngram"], "method ngram contradicts --no-ngram"),
        (NUMBER, ["--target", "t"], "model is missing"),
        (DRAFT_METHOD, ["--target", "t"], "model is missing"),
    ],
)
def test_it_and_flags_do_not_contradict_each_other(config: str, words: list[str], message: str) -> None:
    with pytest.raises(InvalidParameter, match=f"speculative-config: {message}"):
        stack_options(options_of("--speculative-config", config, *words))
