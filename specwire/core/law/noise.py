"""Noise keyed by seed, stream, choice, position and token: Philox4x32-10 and Gumbel draws."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specwire.core.messages import MOST_KEPT, PARTS, Weights
from specwire.core.text import EMPTY_HASH, extend_hash

# ----------------------------------------------------------------------------------------------------------------------
# Counter-based Gumbel noise: a pure function of (seed, stream, choice, position, token id).
#
# The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
# section 3.3). Nothing here depends on rounds, chains, rows, attempts or the vocabulary's size, so a token's noise is
# the same wherever and however often it is computed. PROTOCOL.md gives the packing and test vectors.

Integers = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Counter = tuple[int, int, int, int]

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


class Key(NamedTuple):
    """Where one row's noise comes from."""

    seed: int
    choice: int
    position: int


def philox4x32(counter: Counter, key: tuple[int, int]) -> Counter:
    """Encrypt one counter of four 32-bit words under two key words."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = x0 * MULTIPLIERS[0], x2 * MULTIPLIERS[1]
        x0, x1, x2, x3 = (p1 >> 32) ^ x1 ^ k0, p1 & WORD, (p0 >> 32) ^ x3 ^ k1, p0 & WORD
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return x0, x1, x2, x3


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
    integers = tokens.astype(np.uint64, order="C").reshape(-1)
    counter, key = (int(stream), choice & WORD, position & WORD), (seed & WORD, (seed >> 32) & WORD)
    if integers.size <= FEW:
        words = [philox4x32((*counter, token & WORD), key) for token in integers.tolist()]
        integers = np.array([(w0 << 20) | (w1 >> 12) for w0, w1, _, _ in words], np.uint64)
    else:
        _encrypt_all(integers, counter, key)
    return integers.reshape(tokens.shape)


def gumbel(seed: int, choice: int, position: int, ids: Ids) -> Floats:
    """Standard Gumbel noise for `ids` at `position`."""
    return gumbel_of(uniform_integers(seed, choice, position, ids))


def gumbel_of(integers: Integers) -> Floats:
    """-log(-log(u)), u = (integer + 1/2) / 2**52; in the place of the integers."""
    # Under the exponent of 1.0 an integer reads 1 + integer / 2**52. The difference is exact.
    np.bitwise_or(integers, EXPONENT_OF_ONE, integers)
    noise: Floats = integers.view(np.float64)
    np.subtract(noise, 1.0 - 0.5 * 2.0**-NOISE_BITS, noise)
    for _ in range(2):
        np.log(noise, noise)
        np.negative(noise, noise)
    return noise


# The same cipher for many ids: a whole vocabulary is drawn for every token decided on a CPU. What makes it fast:
#
# - The counters differ in the token only, so that in the first three rounds most words are the same for all.
# - An odd word is kept as the 64-bit product whose low half it is, and masked where it is used.
# - Of the last round two words are wanted. They are the halves of one 64-bit integer.
# - A word is a contiguous array of 64-bit integers, a constant an array without an axis. Calls on strided halves of 32
#   bits, on two words in one array or with Python's integers take two to three times as long.

Number = npt.NDArray[np.uint64]
Pairs = tuple[tuple[int, int], ...]

# Up to so many ids are encrypted one by one: 4 us each, where many at once take 20 us and 8 ns each.
FEW = 4
# Ids at a time: five arrays of this length stay in a core's own cache.
BLOCK = 8192


def _numbers(values: Sequence[int]) -> tuple[Number, ...]:
    array = np.array(values, np.uint64)
    return tuple(array[index, ...] for index in range(len(values)))


M0, M1, LOW, HALF, SPARE, EXPONENT_OF_ONE = _numbers((*MULTIPLIERS, WORD, 32, 64 - NOISE_BITS, 1023 << NOISE_BITS))


@lru_cache(maxsize=256)
def _round_keys(k0: int, k1: int) -> tuple[Pairs, tuple[Number, ...]]:
    """The key words (k0, k1) of every round, and those that `_encrypt` takes in its rounds 4 to 10."""
    pairs = tuple(((k0 + number * WEYL[0]) & WORD, (k1 + number * WEYL[1]) & WORD) for number in range(ROUNDS))
    general = [word for pair in pairs[3:8] for word in pair]
    return pairs, _numbers((*general, pairs[8][1], pairs[9][0] << 32))


def _shared_words(c0: int, c1: int, c2: int, keys: Pairs) -> tuple[Number, ...]:
    """What the words that all counters have in common come to in the first three rounds, as `_encrypt` takes it."""
    m0, m1 = MULTIPLIERS
    (a0, a1), (b0, b1), (d0, d1) = keys[:3]
    p1, p3 = m1 * c2, m0 * c0
    q3 = m0 * ((p1 >> 32) ^ c1 ^ a0)
    q1 = m1 * ((q3 >> 32) ^ (p3 & WORD) ^ b1)
    return _numbers(((p3 >> 32) ^ a1, (p1 & WORD) ^ b0, (q1 >> 32) ^ d0, (q3 & WORD) ^ d1, q1 & WORD))


def _encrypt_all(tokens: Integers, counter: tuple[int, int, int], key: tuple[int, int]) -> None:
    """Put the 52-bit integers in place of the tokens, whose counters begin with three words."""
    keys, later_keys = _round_keys(*key)
    shared = _shared_words(*counter, keys)
    scratch = np.empty((4, min(tokens.size, BLOCK)), np.uint64)
    for first in range(0, tokens.size, BLOCK):
        block = tokens[first : first + BLOCK]
        _encrypt(block, shared, later_keys, scratch[:, : block.size])


def _encrypt(tokens: Integers, shared: Sequence[Number], keys: Sequence[Number], scratch: Integers) -> None:
    """Put the 52-bit integers in place of one block's tokens (n,). scratch: (4, n)."""
    multiply, mask, xor, high = np.multiply, np.bitwise_and, np.bitwise_xor, np.right_shift
    x2, (x0, p1, p3, spare) = tokens, scratch
    # Round 1: x2 alone differs. Round 2: x0 and x1 do.
    mask(x2, LOW, x2)
    xor(x2, shared[0], x2)
    multiply(x2, M1, p1)
    high(p1, HALF, x0)
    xor(x0, shared[1], x0)
    # Round 3: all but x1.
    multiply(x0, M0, p3)
    mask(p1, LOW, x0)
    xor(x0, shared[2], x0)
    high(p3, HALF, x2)
    xor(x2, shared[3], x2)
    p1[:] = shared[4]
    # Rounds 4 to 8. A product takes the place of its factor, a new even word that of an odd one.
    for index in range(0, 10, 2):
        for even, factor, odd, key in ((x2, M1, p1, keys[index]), (x0, M0, p3, keys[index + 1])):
            multiply(even, factor, even)
            high(even, HALF, spare)
            mask(odd, LOW, odd)
            xor(odd, key, odd)
            xor(odd, spare, odd)
        x0, p1, x2, p3 = p1, x2, p3, x0
    # Round 9: x1 and x2 only.
    multiply(x0, M0, x0)
    high(x0, HALF, x0)
    mask(p3, LOW, p3)
    xor(p3, keys[10], p3)
    xor(p3, x0, p3)
    multiply(x2, M1, x2)
    # Round 10: high(p) ^ x1 ^ k0 and low(p), less the last bits.
    multiply(p3, M1, p3)
    np.left_shift(x2, HALF, x2)
    xor(p3, x2, p3)
    xor(p3, keys[11], p3)
    high(p3, SPARE, tokens)


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


# ----------------------------------------------------------------------------------------------------------------------
# The distribution that a draft token was drawn from, as integers: what `rejection` and `block` test it against.
#
# The drafter cuts its distribution to the most probable ids and rounds it to integers *before* it draws, and draws from
# those. So what it sends is what it drew from, to the last bit, and neither the cut nor the rounding can bias a text.


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
