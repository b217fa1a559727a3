"""`--deterministic`: a session's text is a function of itself, bit for bit, in any company and after any takeover."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import OlmoConfig

from specwire.lm import load_model
from tests.lm.models import near_ties, save
from tests.verify_service.mixes import Case, alone, differing, samplings, together

SESSIONS, TOKENS, VOCABULARY = 24, 20, 400
MIXES = (1, 2)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Loading a model sets them for this whole thread."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(near_ties(VOCABULARY), tmp_path_factory.mktemp("models") / "llama")


def _cases(count: int) -> list[Case]:
    choice = random.Random(5)
    prompts = [tuple(choice.randrange(VOCABULARY) for _ in range(choice.randint(2, 24))) for _ in range(count)]
    return [Case(prompt, sampling, TOKENS) for prompt, sampling in zip(prompts, samplings(count), strict=True)]


def _flips(folder: str, sessions: int = SESSIONS, **how: object) -> list[int]:
    """Tokens that differ between the sessions alone and in each mix; drafts are accepted and texts taken over there."""
    models = [load_model(folder, slots=6, **how) for _ in range(2)]  # type: ignore[arg-type]  # by name
    cases = _cases(sessions)
    texts = alone(models[0], cases)
    assert [len(text) for text in texts] == [TOKENS] * sessions
    mixes = [together(models, cases, texts, seed) for seed in MIXES]
    assert sum(mixed.moves for mixed in mixes) > 0
    assert sum(mixed.accepted for mixed in mixes) > 0
    return [differing(texts, mixed.texts)[0] for mixed in mixes]


@pytest.mark.parametrize(
    ("dtype", "threads", "sessions"), [("float32", 1, SESSIONS), ("bfloat16", 1, SESSIONS), ("bfloat16", 2, 8)]
)
def test_texts_alone_and_in_random_mixes_are_the_same(folder: str, dtype: str, threads: int, sessions: int) -> None:
    assert _flips(folder, sessions, dtype=dtype, deterministic=True, threads=threads) == [0, 0]


def test_without_it_they_are_not(tmp_path: Path) -> None:
    """Of a model's own modules at least; else the test above would show nothing."""
    folder = save(near_ties(VOCABULARY, kind=OlmoConfig), tmp_path)
    assert sum(_flips(folder, dtype="bfloat16", threads=1)) > 0
