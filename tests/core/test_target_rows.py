"""The verifier's `judging.Target`: probabilities, coins and residuals from a row's log-probabilities."""

from __future__ import annotations

from dataclasses import replace
from math import log

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import chisquare

from specwire.core.law.acceptance import TargetRows, excess
from specwire.core.law.noise import epoch_of, seed_behind
from specwire.core.law.sampling import Sampling
from specwire.core.messages import Weights
from specwire.core.text import hash_of

P = np.array([[0.5, 0.3, 0.2, 0.0], [0.25, 0.25, 0.25, 0.25]])
SEEDS = 4000
ALPHA = 1e-3


def log_p() -> npt.NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(P))


def rows(seed: int = 0) -> TargetRows:
    return TargetRows(log_p, [Sampling(1.0, seed=seed)] * 2, 5, (1, 3))


def test_a_row_s_figures() -> None:
    target = rows()
    assert target.probabilities(0, (2, 0, 3)) == pytest.approx((0.2, 0.5, 0.0))
    assert target.entropy(0) == pytest.approx(-(0.5 * log(0.5) + 0.3 * log(0.3) + 0.2 * log(0.2)))
    assert target.entropy(1) == pytest.approx(log(4))
    assert (target.own(0), target.own(1)) == (1, 3)


def test_coins_come_up_as_often_as_they_are_to() -> None:
    heads = sum(rows(seed).coin(0, 0.3) for seed in range(SEEDS))
    assert chisquare([heads, SEEDS - heads], [0.3 * SEEDS, 0.7 * SEEDS]).pvalue > ALPHA
    assert rows().coin(0, 1)
    assert not rows().coin(0, 0)


@pytest.mark.parametrize("scale", [1.0, 0.8])
def test_residuals_follow_what_is_left(scale: float) -> None:
    """norm((scale p - q)+); q = (0.75, 0.25) over ids 0 and 3."""
    weights = Weights((0, 3), (3, 1))
    left = np.maximum(scale * P[0] - np.array([0.75, 0.0, 0.0, 0.25]), 0.0)
    assert excess(rows(), 0, scale, weights) == pytest.approx(left.sum())
    drawn = np.bincount([rows(seed).residual(0, scale, weights) for seed in range(SEEDS)], minlength=4)
    assert drawn[left == 0.0].sum() == 0
    assert chisquare(drawn[left > 0.0], (left / left.sum() * SEEDS)[left > 0.0]).pvalue > ALPHA


def test_where_nothing_is_left_the_target_s_own_token_stands() -> None:
    assert rows().residual(1, 1, Weights((0, 1, 2, 3), (1, 1, 1, 1))) == 3


def test_each_place_and_epoch_has_numbers_of_its_own() -> None:
    """The text before, every token of it; whose connection; the seed. And equal ones are equal."""
    here = seed_behind(7, epoch_of(3, 1), hash_of([1, 2]))
    assert here == seed_behind(7, epoch_of(3, 1), hash_of([1, 2]))
    others = {
        seed_behind(8, epoch_of(3, 1), hash_of([1, 2])),
        seed_behind(7, epoch_of(3, 2), hash_of([1, 2])),
        seed_behind(7, epoch_of(4, 1), hash_of([1, 2])),
        seed_behind(7, epoch_of(3, 1), hash_of([2, 1])),
        seed_behind(2**64 - 1, epoch_of(2**64 - 1, 2**32 - 1), 2**64 - 1),
    }
    assert len({here, *others}) == 6
    assert all(0 <= seed < 1 << 64 for seed in others)
    assert replace(Sampling(1.0), seed=here).seed == here
