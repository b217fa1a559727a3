"""Output layers wider than the tokenizer. Every family through the whole stack: tests/orchestrator/test_families.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.lm.families import ALONE, SERVED, Family
from tests.lm.models import CONTEXT, VOCABULARY, save
from tests.verify_service.rig import Rig, chain

PROMPT = [5, 17, 40, 3, 9]
COUNT = 30
NEAR_TIE = 1e-4
# A text of one token would be right behind any mistake.
LEAST_DIFFERENT = 4


def _generated(model: PreTrainedModel, words: int = VOCABULARY) -> list[int]:
    """`generate`'s text of ids below `words`; the seed leaves no near-ties, which would make it a matter of luck."""
    given, generate = torch.tensor([PROMPT]), cast("Callable[..., torch.Tensor]", model.generate)
    suppressed = {"suppress_tokens": list(range(words, VOCABULARY))} if words < VOCABULARY else {}
    mask = torch.ones_like(given)
    output = generate(given, attention_mask=mask, max_new_tokens=COUNT, do_sample=False, **suppressed)
    with torch.inference_mode():
        best = model(output).logits[0, len(PROMPT) - 1 : -1, :words].topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > NEAR_TIE
    tokens: list[int] = output[0, len(PROMPT) :].tolist()
    assert len(set(tokens)) >= LEAST_DIFFERENT
    return tokens


def _model(family: Family) -> PreTrainedModel:
    """Without an end of sequence, for texts of one length, and with an output layer that does not repeat its input."""
    config = family.config()
    config.eos_token_id = None
    config.tie_word_embeddings = False
    torch.manual_seed(3)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.eval()
    return model


@pytest.mark.parametrize("family", [pytest.param(each, id=each.name) for each in (SERVED[1], SERVED[6], ALONE[0])])
def test_rows_of_the_output_layer_that_no_token_has_are_never_chosen(family: Family, tmp_path: Path) -> None:
    """As in Qwen2.5, whose output layer is wider than its tokenizer."""
    torch.set_num_threads(1)
    model, words = _model(family), 41
    expected = _generated(model, words)
    assert _generated(model) != expected  # the rows are of some weight
    rig = Rig(save(model, tmp_path, {f"w{index}": index for index in range(words)}), slots=2, context=CONTEXT)
    rig.open(1, PROMPT, max_tokens=COUNT)
    rig.run(before_step=lambda: rig.propose(1, chain(1, PROMPT, expected[:4])))
    assert rig.tokens[1] == expected
    assert rig.lm.info.vocabulary == words
