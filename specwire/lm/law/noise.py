"""Philox4x32-10 and Gumbel noise in torch: the integers of `specwire.core.law.noise`, for many rows at once.

Torch has no unsigned 64-bit arithmetic, so 32-bit words live in int64: a product of two of them wraps, but its low and
high words come out right once masked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch

from specwire.core.law import noise as reference
from specwire.core.law.noise import MULTIPLIERS, NOISE_BITS, ROUNDS, WEYL, WORD, Key, NoiseStream

# Rows of full-vocabulary noise that are kept, and the largest vocabulary they are kept for: at most 16 MiB.
KEPT_ROWS = 128
KEPT_VOCABULARY = 16_384

# Up to so many rows a CPU draws the noise of some ids row by row.
ROWS_APART = 12


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


# On a CPU the noise of a row is made by NumPy, several times as fast. A position is usually asked for more than once (a
# window behind a refused token is computed again), so the latest rows are kept.


def gumbel_row(key: Key, vocabulary: int) -> reference.Floats:
    """Standard Gumbel noise of all ids on a CPU (vocabulary,), not to be changed."""
    if vocabulary <= KEPT_VOCABULARY:
        return _kept_row(key, vocabulary)
    return reference.gumbel(*key, np.arange(vocabulary))


def gumbel_at(keys: Sequence[Key], ids: torch.Tensor) -> torch.Tensor:
    """`gumbel` by whichever is faster: for few ids a row takes 25 us in NumPy, any number of rows 300 us in torch."""
    if ids.device.type == "cpu" and len(keys) <= ROWS_APART:
        pairs = zip(keys, ids.numpy(), strict=True)
        return torch.from_numpy(np.stack([reference.gumbel(*key, row) for key, row in pairs]))
    return gumbel(keys, ids)


def gumbel_of(key: Key, ids: reference.Ids, vocabulary: int) -> reference.Floats:
    """Noise of some ids on a CPU: of a row that is kept for the target, which draws at the same positions."""
    if vocabulary <= KEPT_VOCABULARY:
        return _kept_row(key, vocabulary)[ids]
    return reference.gumbel(*key, ids)


def keep_noise(keys: Iterable[Key], vocabulary: int) -> None:
    """Compute rows that the target will draw by, in case somebody draws by them before."""
    if vocabulary <= KEPT_VOCABULARY:
        for key in keys:
            _kept_row(key, vocabulary)


@lru_cache(maxsize=KEPT_ROWS)
def _kept_row(key: Key, vocabulary: int) -> reference.Floats:
    return reference.gumbel(*key, np.arange(vocabulary))
