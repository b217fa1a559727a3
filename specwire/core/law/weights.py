"""The distribution that a draft token was drawn from, as integers: what `rejection` and `block` test it against.

The drafter cuts its distribution to the most probable ids and rounds it to integers *before* it draws, and draws from
those. So what it sends is what it drew from, to the last bit, and neither the cut nor the rounding can bias a text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specwire.core.law.noise import gumbel
from specwire.core.messages import MOST_KEPT, PARTS, Weights


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
