"""What transformers' `generate` writes with tiny models of every family."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.lm.families import Family
from tests.lm.models import VOCABULARY

PROMPT = [5, 17, 40, 3, 9]
COUNT = 30
NEAR_TIE = 1e-4
# A text of one token would be right behind any mistake.
LEAST_DIFFERENT = 4


def generated(model: PreTrainedModel, words: int = VOCABULARY) -> list[int]:
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


def without_end(family: Family) -> PreTrainedModel:
    """Without an end of sequence, for texts of one length, and with an output layer that does not repeat its input."""
    config = family.config()
    config.eos_token_id = None
    config.tie_word_embeddings = False
    torch.manual_seed(3)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.eval()
    return model
