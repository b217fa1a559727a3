"""Noise keyed by seed, stream, choice, position and token: Philox4x32-10 and Gumbel draws."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from specwire.core.text import EMPTY_HASH, extend_hash

# ----------------------------------------------------------------------------------------------------------------------
# Counter-based Gumbel noise: a pure function of (seed, stream, choice, position, token id).
#
# The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
# section 3.3). Nothing here depends on rounds, chains, rows, attempts or the vocabulary's size, so a token's noise is
# the same wherever and however often it is computed. PROTOCOL.md gives the packing and test vectors.

Words = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF

# 52 bits and a half step: (2**52 - 1 + 0.5) / 2**52 is exact in float64 and below 1. With 53 bits it rounds to 1,
# whose Gumbel value is infinite.
NOISE_BITS = 52


class NoiseStream(IntEnum):
    """Independent uses of noise at one position."""

    GUMBEL = 0
    ACCEPT = 1
    RESIDUAL = 2


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Encrypt four 32-bit counter words, held in uint64 arrays of one shape, under two 32-bit key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0 = c0 * np.uint64(MULTIPLIERS[0])
        product1 = c2 * np.uint64(MULTIPLIERS[1])
        high0, low0 = product0 >> np.uint64(32), product0 & np.uint64(WORD)
        high1, low1 = product1 >> np.uint64(32), product1 & np.uint64(WORD)
        c0, c1, c2, c3 = high1 ^ c1 ^ np.uint64(k0), low1, high0 ^ c3 ^ np.uint64(k1), low0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def uniform_integers(
    seed: int, choice: int, position: int, ids: Ids, stream: NoiseStream = NoiseStream.GUMBEL
) -> Words:
    """52-bit integers, one for each id: the part of the noise that is identical on every machine.

    Args:
        seed: 64-bit key; its low word is the first key word.
        choice: index of the completion among the n of one request.
        position: absolute position of the token being decided.
        ids: token ids, any shape.
    """
    tokens = np.asarray(ids).astype(np.uint64)
    words = [np.broadcast_to(np.uint64(value & WORD), tokens.shape) for value in (int(stream), choice, position)]
    w0, w1, _, _ = philox4x32((words[0], words[1], words[2], tokens), (seed & WORD, (seed >> 32) & WORD))
    return (w0 << np.uint64(20)) | (w1 >> np.uint64(12))


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
