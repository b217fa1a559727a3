"""Recurrent layers whose states hardly fit into memory: windows are shorter, down to none, and texts stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specwire.core.messages import MOST_WINDOW
from specwire.lm.kv_cache import STATES, position_bytes
from specwire.lm.runners.hybrid import state_bytes
from tests.lm.families import HYBRID
from tests.lm.generated import COUNT, PROMPT, generated, without_end
from tests.lm.models import CONTEXT, VOCABULARY, save
from tests.verify_service.rig import Rig, chain

# Of the tokens proposed, one in so many is wrong.
WRONG = 5


@pytest.mark.parametrize("ngram", [False, True])
@pytest.mark.parametrize(("states", "most"), [(STATES, MOST_WINDOW), (8, 6), (2, 0), (1, 0)])
def test_right_and_wrong_proposals_change_no_text(states: int, most: int, ngram: bool, tmp_path: Path) -> None:
    family = next(family for family in HYBRID if family.name == "Falcon-H1")
    model = without_end(family)
    expected, folder = generated(model), save(model, tmp_path, {f"w{index}": index for index in range(VOCABULARY)})
    memory = CONTEXT * position_bytes(model.config, torch.float32) + states * state_bytes(model)
    rig = Rig(folder, context=CONTEXT, ngram=ngram, kv_memory=memory)
    rig.open(1, PROMPT, max_tokens=COUNT)

    def propose() -> None:
        done = len(rig.tokens.get(1, ()))
        drafts = [(token + (at % WRONG == 0)) % VOCABULARY for at, token in enumerate(expected[done:], done + 1)]
        if drafts:
            rig.propose(1, chain(1 + done, [*PROMPT, *expected[:done]], drafts))

    rig.run(before_step=propose)
    assert rig.tokens[1] == expected
    assert rig.lm.most_window == most
    widest = max(feed.wanted - 1 for feed in rig.feeds)
    assert widest <= most
    assert (widest > 0) == (most > 0)
