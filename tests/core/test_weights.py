"""What is sent is what was drawn from: integers, cut and rounded before the draw."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from specwire.core.law.acceptance import choose
from specwire.core.law.noise import draw_quantised, quantise
from specwire.core.law.sampling import Sampling
from specwire.core.messages import MOST_IDS, MOST_KEPT, MOST_TOTAL, PARTS, Weights


def test_the_most_probable_ids_are_kept_in_proportion() -> None:
    weights = quantise([0.5, 0.25, 0.125, 0.125], [7, 3, 0, 9], parts=8)
    assert weights == Weights((7, 3, 0, 9), (4, 2, 1, 1))
    assert (weights.total, weights.of(3), weights.of(0), weights.of(5)) == (8, 2, 1, 0)
    assert quantise([0.5, 0.25, 0.25], [1, 2, 3], most=2, parts=9) == Weights((1, 2), (6, 3))


def test_what_rounds_to_nothing_is_left_out_but_never_the_best() -> None:
    assert quantise([1.0, 1e-9], [4, 5]) == Weights((4,), (PARTS,))
    assert quantise([1.0] * 20_000, list(range(20_000)), most=20_000).ids == (0,)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=80).filter(lambda shares: max(shares) > 1e-6))
def test_any_distribution_becomes_one_that_a_verifier_takes(shares: list[float]) -> None:
    weights = quantise(np.array(shares), list(range(len(shares))))
    assert len(weights.ids) <= MOST_KEPT
    assert abs(weights.total - PARTS) <= len(shares)
    assert all(weights.possible(token, len(shares)) for token in weights.ids)


@pytest.mark.parametrize(
    ("ids", "numbers"),
    [
        ((), ()),
        ((1, 2), (1,)),
        ((1,), (1, 2)),
        ((1, 1), (1, 1)),
        ((1, 2), (1, 0)),
        ((1, 10), (1, 1)),
        ((1, -1), (1, 1)),
        ((0, 2), (1, 1)),
        ((1, 2), (1, MOST_TOTAL)),
        (tuple(range(MOST_IDS + 1)), (1,) * (MOST_IDS + 1)),
    ],
)
def test_what_cannot_have_given_the_token_is_refused(ids: tuple[int, ...], numbers: tuple[int, ...]) -> None:
    assert not Weights(ids, numbers).possible(1, vocabulary=10)


def test_draws_follow_the_integers() -> None:
    """Over 4,000 seeds; ids of the vocabulary's other end as well."""
    weights = Weights((151_000, 0, 7), (5, 2, 1))
    drawn = [draw_quantised(weights, seed, choice=1, position=9) for seed in range(4000)]
    assert chisquare([drawn.count(token) for token in weights.ids], np.array([5, 2, 1]) * 500).pvalue > 1e-3


def test_the_target_s_own_draw_has_the_same_noise() -> None:
    """Equal distributions give equal tokens: a chain survives what the target draws itself."""
    weights = Weights((0, 1, 2, 3), (4, 3, 2, 1))
    logits = np.log(np.array([4.0, 3.0, 2.0, 1.0]))
    for seed in range(100):
        assert draw_quantised(weights, seed, 2, 5) == choose(logits, 5, Sampling(1.0, seed=seed, choice=2))
