"""Output layers wider than the tokenizer. Every family through the whole stack: tests/orchestrator/test_families.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.lm.families import ALONE, SERVED, Family
from tests.lm.generated import COUNT, PROMPT, generated, without_end
from tests.lm.models import CONTEXT, save
from tests.verify_service.rig import Rig, chain


@pytest.mark.parametrize("family", [pytest.param(each, id=each.name) for each in (SERVED[1], SERVED[6], ALONE[0])])
def test_rows_of_the_output_layer_that_no_token_has_are_never_chosen(family: Family, tmp_path: Path) -> None:
    """As in Qwen2.5, whose output layer is wider than its tokenizer."""
    torch.set_num_threads(1)
    model, words = without_end(family), 41
    expected = generated(model, words)
    assert generated(model) != expected  # the rows are of some weight
    rig = Rig(save(model, tmp_path, {f"w{index}": index for index in range(words)}), slots=2, context=CONTEXT)
    rig.open(1, PROMPT, max_tokens=COUNT)
    rig.run(before_step=lambda: rig.propose(1, chain(1, PROMPT, expected[:4])))
    assert rig.tokens[1] == expected
    assert rig.lm.info.vocabulary == words
