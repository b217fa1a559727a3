"""Every family writes greedily what transformers' `generate` writes, whatever is proposed, whoever shares a step."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import PreTrainedModel

from tests.lm.families import ALONE, SERVED, SLIDING, Family
from tests.lm.models import CONTEXT, VOCABULARY, build, save
from tests.verify_service.rig import Rig, chain

PROMPT = [5, 17, 40, 3, 9]
COUNT = 30
NEAR_TIE = 1e-4
FAMILIES = [*SERVED, *SLIDING, *ALONE]


def _generated(model: PreTrainedModel) -> list[int]:
    """`generate`'s text; the seed leaves no near-ties, which would make it a matter of luck."""
    given, generate = torch.tensor([PROMPT]), cast("Callable[..., torch.Tensor]", model.generate)
    output = generate(given, attention_mask=torch.ones_like(given), max_new_tokens=COUNT, do_sample=False)
    with torch.inference_mode():
        best = model(output).logits[0, len(PROMPT) - 1 : -1].topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > NEAR_TIE
    tokens: list[int] = output[0, len(PROMPT) :].tolist()
    return tokens


@pytest.mark.parametrize("family", [pytest.param(family, id=f"{family.name} {n}") for n, family in enumerate(FAMILIES)])
def test_equals_generate_with_good_bad_and_no_proposals(family: Family, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    config = family.config()
    config.eos_token_id = None
    model = build(config)
    expected, guesses = _generated(model), random.Random(7)
    rig = Rig(save(model, tmp_path), slots=3, context=CONTEXT)
    rig.open(1, PROMPT, max_tokens=COUNT)
    rig.open(2, PROMPT, max_tokens=COUNT)
    rig.open(3, PROMPT, max_tokens=COUNT - 2, ngram=False)

    def propose() -> None:
        for handle, right in ((1, 4), (2, 0)):
            done = len(rig.tokens.get(handle, []))
            wrong = [guesses.randrange(VOCABULARY) for _ in range(2)]
            tokens = [*expected[done : done + right], *wrong]
            rig.propose(handle, chain(done + 1, PROMPT + expected[:done], tokens))

    rig.run(before_step=propose)
    assert rig.tokens == {1: expected, 2: expected, 3: expected[:-2]}
    assert "ACCEPTED" in {outcome.name for outcome in rig.outcomes[1]}
