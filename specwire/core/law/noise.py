"""Noise keyed by seed, stream, choice, position and token: Philox4x32-10 and Gumbel draws."""

from __future__ import annotations

import sys
from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from specwire.core.text import EMPTY_HASH, extend_hash

# ----------------------------------------------------------------------------------------------------------------------
# Counter-based Gumbel noise: a pure function of (seed, stream, choice, position, token id).
#
# The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
# section 3.3). Nothing here depends on rounds, chains, rows, attempts or the vocabulary's size, so a token's noise is
# the same wherever and however often it is computed. PROTOCOL.md gives the packing and test vectors.

Words = npt.NDArray[np.uint32]
Integers = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
FACTORS = np.array(MULTIPLIERS, np.uint64)[:, None]
WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
# The halves of a 64-bit product.
HALF = np.dtype(np.uint32)
LOW, HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)

# 52 bits and a half step: (2**52 - 1 + 0.5) / 2**52 is exact in float64 and below 1. With 53 bits it rounds to 1,
# whose Gumbel value is infinite.
NOISE_BITS = 52


class NoiseStream(IntEnum):
    """Independent uses of noise at one position."""

    GUMBEL = 0
    ACCEPT = 1
    RESIDUAL = 2


@lru_cache(maxsize=256)
def round_keys(k0: int, k1: int) -> tuple[Words, ...]:
    """The key words of each round, (2, 1)."""
    rounds = range(ROUNDS)
    keys = [((k0 + number * WEYL[0]) & WORD, (k1 + number * WEYL[1]) & WORD) for number in rounds]
    return tuple(np.array(pair, np.uint32)[:, None] for pair in keys)


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Encrypt counters under two 32-bit key words. counter: (4, any number), the words of one in a column.

    Both products of a round are one: for few counters the time goes into calls, of which there are three a round.
    """
    even, odd = counter[0::2], counter[1::2]
    for keys in round_keys(*key):
        wide = np.multiply(even, FACTORS).view(HALF).reshape(*even.shape, 2)[::-1]
        even = wide[..., HIGH] ^ odd
        even ^= keys
        odd = wide[..., LOW]
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniform_integers(
    seed: int, choice: int, position: int, ids: Ids, stream: NoiseStream = NoiseStream.GUMBEL
) -> Integers:
    """52-bit integers, one for each id: the part of the noise that is identical on every machine.

    Args:
        seed: 64-bit key; its low word is the first key word.
        choice: index of the completion among the n of one request.
        position: absolute position of the token being decided.
        ids: token ids, any shape.
    """
    tokens = np.asarray(ids)
    counter = np.empty((4, tokens.size), np.uint32)
    counter[:3] = np.array([int(stream), choice & WORD, position & WORD], np.uint32)[:, None]
    counter[3] = tokens.reshape(-1)
    w0, w1, _, _ = philox4x32(counter, (seed & WORD, (seed >> 32) & WORD)).astype(np.uint64)
    integers: Integers = ((w0 << np.uint64(20)) | (w1 >> np.uint64(12))).reshape(tokens.shape)
    return integers


def gumbel(seed: int, choice: int, position: int, ids: Ids) -> Floats:
    """Standard Gumbel noise for `ids` at `position`: -log(-log(u)), u = (integer + 1/2) / 2**52."""
    integers = uniform_integers(seed, choice, position, ids)
    uniform = (integers.astype(np.float64) + 0.5) * 2.0**-NOISE_BITS
    noise: Floats = -np.log(-np.log(uniform))
    return noise


# ----------------------------------------------------------------------------------------------------------------------
# Randomness for the rules that look at proposals: every random number is used for one decision.
#
# The noise of `greedy` and `coupled` depends on the position only, so that a text can be replayed. Under `rejection`
# and `block` that would be wrong twice over:
#
# - `block` judges a token by those behind it. Where it refuses, that says something about tokens at later positions,
#   and so about the noise that they were drawn with. Drawn again there with the same noise, they are biased.
# - What a verifier decided and the log did not get is decided again by its successor. The lost decision has shown in
#   what the drafter did meanwhile, so whether a token is tested now may depend on it: it must not be drawn, nor
#   tested, with the same numbers.
#
# So the seed of a draw at a place depends on the text before it, every token of it, and on the *epoch*: another one for
# each time that a verifier opens the session. A drafter that draws behind the same text in the same epoch has the noise
# of the target's own draw there, and draws the same token again.


def epoch_of(fence: int, attach: int) -> int:
    """The epoch of one connection generation, 64 bits and never 0."""
    return extend_hash(extend_hash(EMPTY_HASH, fence), attach) or 1


def seed_behind(seed: int, epoch: int, prefix_hash: int) -> int:
    """The 64-bit noise key for what stands behind the text of `prefix_hash`.

    Three words mixed as tokens are into a text's hash (PROTOCOL.md, section 4).
    """
    return extend_hash(extend_hash(extend_hash(EMPTY_HASH, seed), epoch), prefix_hash)
