"""Target and drafter of every family, through the whole stack: greedily what transformers' `generate` writes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from specwire.client import Completion
from specwire.client.requests import RequestOptions
from tests.lm.families import ALONE, CHUNKED, HYBRID, OWN, SERVED, SLIDING, Family
from tests.lm.generated import COUNT, PROMPT, generated, without_end
from tests.lm.models import CONTEXT, VOCABULARY, save
from tests.orchestrator.stack import drafted, stack

# Of the target's weights, by which the drafter's are off.
NOISE = 0.01
FAMILIES = [*SERVED, *SLIDING, *CHUNKED, *OWN, *ALONE, *HYBRID]
WORDS = {f"w{index}": index for index in range(VOCABULARY)}


@torch.no_grad()
def _disturb(model: PreTrainedModel) -> PreTrainedModel:
    for parameter in model.parameters():
        parameter.add_(NOISE * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("family", [pytest.param(family, id=f"{family.name} {n}") for n, family in enumerate(FAMILIES)])
async def test_target_and_drafter_write_what_generate_writes(family: Family, tmp_path: Path) -> None:
    """One drafted for by a disturbed copy, two by nobody, in the same steps."""
    torch.set_num_threads(1)
    model = without_end(family)
    expected = generated(model)
    target = save(model, tmp_path / "target", WORDS)
    draft = save(_disturb(model), tmp_path / "draft", WORDS)
    wish = RequestOptions(max_tokens=COUNT)
    async with stack(target, draft, plan="lockstep:3", slots=3, context=CONTEXT, patient=True) as running:
        ways: list[RequestOptions] = [wish, {**wish, "drafting": False}, {**wish, "drafting": False}]

        async def beside() -> list[Completion]:
            return list(await asyncio.gather(*(running.client.complete(PROMPT, **way) for way in ways)))

        done = await drafted(beside)
    assert [list(each.tokens) for each in done] == [expected] * 3
