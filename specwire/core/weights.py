"""The distribution that a draft token was drawn from, as integers: what `rejection` and `block` test it against.

The drafter cuts its distribution to the most probable ids and rounds it to integers *before* it draws, and draws from
those. So what it sends is what it drew from, to the last bit, and neither the cut nor the rounding can bias a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specwire.core.noise import gumbel

# Ids that a drafter keeps, and what their integers add up to, about: an id of less than 1 / 8192 is left out.
MOST_KEPT = 32
PARTS = 4096
# What a verifier takes.
MOST_IDS = 256
MOST_TOTAL = (1 << 31) - 1

Number = float | Fraction
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Weights:
    """ids[i] is drawn with probability weights[i] / total."""

    ids: tuple[int, ...]
    weights: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.weights)

    def of(self, token: int) -> int:
        """The token's own weight; 0 where it cannot be drawn."""
        return self.weights[self.ids.index(token)] if token in self.ids else 0

    def possible(self, token: int, vocabulary: int) -> bool:
        """Whether this is a distribution over the vocabulary that can have given `token`."""
        sound = 0 < len(self.ids) == len(self.weights) <= MOST_IDS and len(set(self.ids)) == len(self.ids)
        if not sound or min(self.weights) < 1 or self.total > MOST_TOTAL:
            return False
        return min(self.ids) >= 0 and max(self.ids) < vocabulary and token in self.ids


class Draft(NamedTuple):
    """A draft token, and what it was drawn from where that was told."""

    token: int
    weights: Weights | None = None


def quantise(probabilities: npt.ArrayLike, ids: Sequence[int], most: int = MOST_KEPT, parts: int = PARTS) -> Weights:
    """Integers in proportion to the `most` greatest of `probabilities`, which belong to `ids`; zeros are left out.

    The most probable id is always kept.
    """
    shares = np.asarray(probabilities, dtype=np.float64)
    order = np.argsort(-shares, kind="stable")[:most]
    rounded = np.rint(shares[order] * (parts / shares[order].sum())).astype(np.int64)
    rounded[0] = max(rounded[0], 1)
    kept = rounded > 0
    return Weights(tuple(int(ids[index]) for index in order[kept]), tuple(int(weight) for weight in rounded[kept]))


def draw_quantised(weights: Weights, seed: int, choice: int, position: int) -> int:
    """argmax(log w + G): a token with probability w / total, by the noise that the target's own draw there has."""
    noise = gumbel(seed, choice, position, np.array(weights.ids, dtype=np.int64))
    return weights.ids[int(np.argmax(np.log(np.array(weights.weights, dtype=np.float64)) + noise))]
