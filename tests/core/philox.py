"""An independent Philox4x32-10: plain Python integers for one counter, numpy over seeds for the law's tests.

Written from the paper's section 3.3, not from specwire.core.law.noise: the two share no line.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Counter = tuple[int, int, int, int]
MASK = 2**32 - 1


def multiply(a: int, b: int) -> tuple[int, int]:
    """High and low word of a 32 x 32 bit product."""
    return divmod(a * b, 2**32)


def philox(counter: Counter, key: tuple[int, int]) -> Counter:
    x0, x1, x2, x3 = counter
    for number in range(10):
        k0 = (key[0] + number * 0x9E3779B9) & MASK
        k1 = (key[1] + number * 0xBB67AE85) & MASK
        hi0, lo0 = multiply(0xD2511F53, x0)
        hi1, lo1 = multiply(0xCD9E8D57, x2)
        x0, x1, x2, x3 = hi1 ^ x1 ^ k0, lo1, hi0 ^ x3 ^ k1, lo0
    return x0, x1, x2, x3


def integer(seed: int, choice: int, position: int, token: int, stream: int = 0) -> int:
    """The 52-bit integer of one token's noise."""
    high, low, _, _ = philox((stream, choice, position, token), (seed & MASK, seed >> 32))
    return high * 2**20 + low // 2**12


def gumbel(seed: int, choice: int, position: int, token: int) -> float:
    return -math.log(-math.log((integer(seed, choice, position, token) + 0.5) / 2**52))


def gumbel_over_seeds(seeds: npt.NDArray[np.uint64], position: int, vocabulary: int) -> npt.NDArray[np.float64]:
    """Noise (seeds, vocabulary) of choice 0 at one position, many keys at once."""
    shape = (len(seeds), vocabulary)
    x = [np.zeros(shape, np.uint64) for _ in range(4)]
    x[2] += np.uint64(position)
    x[3] += np.arange(vocabulary, dtype=np.uint64)
    k0 = (seeds & np.uint64(MASK))[:, None]
    k1 = (seeds >> np.uint64(32))[:, None]
    for _ in range(10):
        a, b = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [
            (b >> np.uint64(32)) ^ x[1] ^ k0,
            b & np.uint64(MASK),
            (a >> np.uint64(32)) ^ x[3] ^ k1,
            a & np.uint64(MASK),
        ]
        k0 = (k0 + np.uint64(0x9E3779B9)) & np.uint64(MASK)
        k1 = (k1 + np.uint64(0xBB67AE85)) & np.uint64(MASK)
    integers = x[0] * np.uint64(2**20) + x[1] // np.uint64(2**12)
    result: npt.NDArray[np.float64] = -np.log(-np.log((integers.astype(np.float64) + 0.5) / 2**52))
    return result
