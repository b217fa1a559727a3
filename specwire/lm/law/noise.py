"""Philox4x32-10 and Gumbel noise in torch: the integers of `specwire.core.law.noise`, for many rows at once.

Torch has no unsigned 64-bit arithmetic, so 32-bit words live in int64: a product of two of them wraps, but its low and
high words come out right once masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from specwire.core.law import noise as reference
from specwire.core.law.noise import MULTIPLIERS, NOISE_BITS, ROUNDS, WEYL, WORD, Key, NoiseStream

# See `loudest`; integers below LOUD have noise below QUIET, also as it is rounded.
QUIET = 5.0
LOUD = np.uint64(math.exp(-math.exp(-QUIET + 1e-6)) * 2**NOISE_BITS)


def uniform_integers(keys: Sequence[Key], ids: torch.Tensor) -> torch.Tensor:
    """52-bit integers, int64 (rows, n), for token ids (rows, n) or (1, n)."""
    first, second = MULTIPLIERS
    low = _noise_column([key.seed & WORD for key in keys], ids.device)
    high = _noise_column([key.seed >> 32 for key in keys], ids.device)
    c0 = torch.full_like(low, int(NoiseStream.GUMBEL))
    c1 = _noise_column([key.choice for key in keys], ids.device)
    c2 = _noise_column([key.position for key in keys], ids.device)
    c3 = ids
    for index in range(ROUNDS):
        k0, k1 = (low + index * WEYL[0]) & WORD, (high + index * WEYL[1]) & WORD
        product0, product1 = c0 * first, c2 * second
        c0, c2 = ((product1 >> 32) ^ (c1 ^ k0)) & WORD, ((product0 >> 32) ^ (c3 ^ k1)) & WORD
        c1, c3 = product1 & WORD, product0 & WORD
    return (c0 << 20) | (c1 >> 12)


def _noise_column(words: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.long, device=device).unsqueeze(1)


def gumbel(keys: Sequence[Key], ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64 (rows, n): -log(-log(u)), u = (integer + 1/2) / 2**52."""
    uniform = uniform_integers(keys, ids).double().add_(0.5).mul_(2.0**-NOISE_BITS)
    return uniform.log_().neg_().log_().neg_()


def loudest(key: Key, scores: reference.Floats) -> int:
    """argmax(scores + noise) on a CPU, the first of several, by NumPy. scores: (vocabulary,) float64.

    Logarithms take longer than all the rest, and few ids can win: those whose score is at most QUIET below what the
    best id comes to, and those whose noise alone is louder than QUIET.
    """
    integers, best = reference.uniform_integers(*key, _all_ids(len(scores))), scores.argmax()
    reached = scores[best] + reference.gumbel_of(integers[best : best + 1].copy())[0]
    able = ((scores >= reached - QUIET) | (integers >= LOUD)).nonzero()[0]
    return int(able[(scores[able] + reference.gumbel_of(integers[able])).argmax()])


@lru_cache(maxsize=4)
def _all_ids(vocabulary: int) -> reference.Ids:
    return np.arange(vocabulary)
