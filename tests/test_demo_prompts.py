"""demo_prompts.json holds what the rule of demo_pair/train/prompts.py gives."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from demo_pair import DEMO_PROMPTS, DEMO_SEED, DEMO_TEMPERATURES, DEMO_TOKENS, TARGET, demo_prompts
from demo_pair.train import evaluate
from demo_pair.train.data import MANIFEST
from demo_pair.train.prompts import DEMO_COUNT, MOST_REPEATED, repeated, shuffled
from specwire.core.law.sampling import Sampling

ROWS = json.loads(DEMO_PROMPTS.read_text())
# Of the chosen: one at the limit, and one on either side of it.
AGAIN = (0, 1, 2)


def repeated_by_hand(text: list[int], start: int) -> float:
    guessed = 0
    for position in range(start, len(text)):
        earlier = range(3, position)
        guessed += any(text[at - 3 : at + 1] == text[position - 3 : position + 1] for at in earlier)
    return guessed / (len(text) - start)


def test_what_is_repeated() -> None:
    assert repeated([1, 2, 3, 4, 1, 2, 3, 4], 4) == 1 / 4
    assert repeated([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4], 8) == 1 / 4  # somewhere, not last
    assert repeated([7] * 8, 4) == 1.0
    assert repeated([1, 2, 3, 4, 5, 6], 2) == 0.0
    text = torch.randint(3, (300,), generator=torch.Generator().manual_seed(5)).tolist()
    assert repeated(text, 100) == repeated_by_hand(text, 100)


def test_all_pass_and_are_held_out() -> None:
    split = {path: part for path, _, part in json.loads(MANIFEST.read_text())["rows"]}
    prompts = demo_prompts()
    assert len(prompts) == len(ROWS) == DEMO_COUNT
    assert all(max(row["repeated"]) <= MOST_REPEATED for row in ROWS)
    assert {split[prompt.name.split(":")[0]] for prompt in prompts} == {"held_out"}
    assert prompts == shuffled(prompts)


@pytest.mark.parametrize("index", AGAIN)
def test_the_targets_own_text_repeats_as_much_as_was_written(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers' own model, one text at a time."""
    monkeypatch.setattr(evaluate, "NEW_TOKENS", DEMO_TOKENS)
    target = LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    ids = PreTrainedTokenizerFast.from_pretrained(TARGET)(ROWS[index]["text"]).input_ids
    for temperature, share in zip(DEMO_TEMPERATURES, ROWS[index]["repeated"], strict=True):
        text = evaluate.completion(target, ids, Sampling(temperature=temperature, seed=DEMO_SEED))
        assert len(text) == len(ids) + DEMO_TOKENS
        assert repeated_by_hand(text, len(ids)) == share
