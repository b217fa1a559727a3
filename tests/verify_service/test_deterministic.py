"""`--deterministic`: a session's text is a function of itself, bit for bit, in any company and after any takeover."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import LlamaConfig

from bench.mixes import Case, alone, differing, samplings, together
from specwire.lm import LanguageModel, load_model
from tests.lm.models import ROTARY, build, save

SESSIONS, TOKENS, VOCABULARY = 24, 20, 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Small weights: near-ties everywhere, so that a changed bit changes texts."""
    made = LlamaConfig(**{**ROTARY, "vocab_size": VOCABULARY, "intermediate_size": 1408, "initializer_range": 0.02})
    made.eos_token_id = None
    model = build(made)
    with torch.no_grad():
        model.get_parameter("lm_head.weight").mul_(1e-4)
    return save(model, tmp_path_factory.mktemp("models") / "llama")


def _cases() -> list[Case]:
    choice = random.Random(5)
    prompts = [tuple(choice.randrange(VOCABULARY) for _ in range(choice.randint(2, 24))) for _ in range(SESSIONS)]
    return [Case(prompt, sampling, TOKENS) for prompt, sampling in zip(prompts, samplings(SESSIONS), strict=True)]


def _flips(models: list[LanguageModel]) -> list[int]:
    """Tokens that differ between the sessions alone and in each of two mixes."""
    cases = _cases()
    texts = alone(models[0], cases)
    assert [len(text) for text in texts] == [TOKENS] * SESSIONS
    return [differing(texts, together(models, cases, texts, seed))[0] for seed in (1, 2)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts_alone_and_in_random_mixes_are_the_same(folder: str, dtype: str) -> None:
    models = [load_model(folder, slots=6, dtype=dtype, deterministic=True, threads=1) for _ in range(2)]
    assert _flips(models) == [0, 0]


def test_without_it_they_are_not(folder: str) -> None:
    """Else the test above would show nothing."""
    models = [load_model(folder, slots=6, dtype="bfloat16", lean=False, threads=1) for _ in range(2)]
    assert sum(_flips(models)) > 0
