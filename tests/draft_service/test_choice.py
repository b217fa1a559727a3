"""The drafter's draw: the target's own choice from the same logits, wherever that choice is among the candidates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specwire.core.draft import DraftRow
from specwire.core.law.acceptance import choose
from specwire.core.law.sampling import Sampling, seen_in
from specwire.lm.guesses import CANDIDATES, draw

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.3, seed=1),
    Sampling(temperature=1.0, seed=2),
    Sampling(temperature=1.0, seed=3, top_k=3),
    Sampling(temperature=1.5, seed=4, top_p=0.5),
    Sampling(temperature=2.0, seed=5, top_k=10, top_p=0.7),
    Sampling(temperature=1.0, seed=6, top_k=1),
    Sampling(temperature=1.0, seed=7, top_p=1e-9),
]


def logits(rows: int, vocabulary: int = 50, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(8)) * spread


@pytest.mark.parametrize("allowed", [1.0, 0.2])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_draws_are_the_targets_choices(sampling: Sampling, allowed: float) -> None:
    """Of what a constraint lets stand, too. Ids a ten-thousandth as likely as the best are left out, so that hardly any
    choice may differ.
    """
    scores = logits(200)
    masks = np.random.default_rng(9).random(scores.shape) < allowed
    drawn = draw(scores, [DraftRow(position, sampling, allowed=mask) for position, mask in enumerate(masks)])
    assert all(mask[token] for mask, token in zip(masks, drawn, strict=True))
    pairs = enumerate(zip(scores.numpy(), masks, strict=True))
    chosen = [choose(row, position, sampling, allowed=mask) for position, (row, mask) in pairs]
    assert sum(mine != theirs for mine, theirs in zip(drawn, chosen, strict=True)) <= 1


def test_rows_of_one_batch_may_differ_in_everything() -> None:
    scores = logits(len(SAMPLINGS))
    rows = [DraftRow(40 + index, sampling) for index, sampling in enumerate(SAMPLINGS)]
    one_by_one = [draw(scores[index : index + 1], [row])[0] for index, row in enumerate(rows)]
    assert draw(scores, rows) == one_by_one


def test_ties_go_to_the_lowest_id_and_masked_ids_are_never_drawn() -> None:
    scores = torch.zeros(1, 9)
    assert draw(scores, [DraftRow(3, Sampling())]) == [0]
    scores[0, :4] = scores[0, 5:] = -torch.inf
    assert draw(scores, [DraftRow(0, Sampling(temperature=1.0))]) == [4]


def test_a_flat_distribution_is_drawn_from_its_likeliest_ids() -> None:
    scores = logits(1, 5000, spread=0.01)
    best = set(scores[0].topk(CANDIDATES).indices.tolist())
    drawn = {draw(scores, [DraftRow(position, Sampling(temperature=1.0))])[0] for position in range(50)}
    assert drawn <= best
    assert len(drawn) > 10


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_what_the_target_changes_by_bias_and_penalties_is_changed_here_too(temperature: float) -> None:
    """The same logits behind the same text give the same tokens."""
    sampling = Sampling(
        temperature,
        seed=6,
        repetition_penalty=1.3,
        presence_penalty=0.8,
        frequency_penalty=0.4,
        logit_bias=((2, 3.0), (7, -9.0)),
    )
    text, prompt_length = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], 4
    scores = logits(40, 12)
    seen = seen_in(text, prompt_length)
    drawn = draw(scores, [DraftRow(position, sampling, seen) for position in range(40)])
    expected = [choose(row.numpy(), position, sampling, seen) for position, row in enumerate(scores)]
    assert drawn == expected
    plain = [DraftRow(position, Sampling(temperature, seed=6)) for position in range(40)]
    assert drawn != draw(scores, plain)
