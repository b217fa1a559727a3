"""Target and drafter of every family, through the whole stack: greedily what transformers' `generate` writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specwire.client.requests import Options
from tests.lm.families import ALONE, SERVED, SLIDING, Family
from tests.lm.models import CONTEXT, VOCABULARY, save
from tests.orchestrator.stack import stack

PROMPT = [5, 17, 40, 3, 9]
COUNT = 30
NEAR_TIE = 1e-4
# A text of one token would be right behind any mistake.
LEAST_DIFFERENT = 4
# Of the target's weights, by which the drafter's are off.
NOISE = 0.01
FAMILIES = [*SERVED, *SLIDING, *ALONE]
WORDS = {f"w{index}": index for index in range(VOCABULARY)}


def _generated(model: PreTrainedModel) -> list[int]:
    """`generate`'s text; the seed leaves no near-ties, which would make it a matter of luck."""
    given, generate = torch.tensor([PROMPT]), cast("Callable[..., torch.Tensor]", model.generate)
    output = generate(given, attention_mask=torch.ones_like(given), max_new_tokens=COUNT, do_sample=False)
    with torch.inference_mode():
        best = model(output).logits[0, len(PROMPT) - 1 : -1].topk(2).values
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


@torch.no_grad()
def _disturb(model: PreTrainedModel) -> PreTrainedModel:
    for parameter in model.parameters():
        parameter.add_(NOISE * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("family", [pytest.param(family, id=f"{family.name} {n}") for n, family in enumerate(FAMILIES)])
async def test_target_and_drafter_write_what_generate_writes(family: Family, tmp_path: Path) -> None:
    """One drafted for by a disturbed copy, two by nobody, in the same steps."""
    torch.set_num_threads(1)
    model = _model(family)
    expected = _generated(model)
    target = save(model, tmp_path / "target", WORDS)
    draft = save(_disturb(model), tmp_path / "draft", WORDS)
    wish = Options(max_tokens=COUNT)
    async with stack(target, draft, plan="lockstep:3", slots=3, context=CONTEXT, patient=True) as running:
        ways: list[Options] = [wish, {**wish, "drafting": False}, {**wish, "drafting": False}]
        done = await asyncio.gather(*(running.client.complete(PROMPT, **way) for way in ways))
    assert [list(each.tokens) for each in done] == [expected] * 3
    assert done[0].stats.accepted > 0
