"""The noise is Philox4x32-10, keyed and counted as PROTOCOL.md says, and finite at both ends."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwire.core.law import noise
from specwire.core.law.noise import BLOCK, FEW, NoiseStream, gumbel, philox4x32, uniform_integers
from tests.core import philox

ZERO = (0, 0, 0, 0)
ONES = (2**32 - 1,) * 4

# Random123's own vectors (kat_vectors, philox4x32, 10 rounds).
KNOWN_ANSWERS = [
    (ZERO, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (ONES, (2**32 - 1, 2**32 - 1), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEEDS = st.integers(0, 2**64 - 1)
WORDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_known_answers(counter: philox.Counter, key: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert philox4x32(counter, key) == expected
    assert philox.philox(counter, key) == expected


@given(st.tuples(WORDS, WORDS, WORDS, WORDS), st.tuples(WORDS, WORDS))
def test_cipher_equals_the_independent_one(counter: philox.Counter, key: tuple[int, int]) -> None:
    assert philox4x32(counter, key) == philox.philox(counter, key)


def by_integers(seed: int, choice: int, position: int, ids: Iterable[int], stream: int = 0) -> list[int]:
    return [philox.integer(seed, choice, position, token, stream) for token in ids]


@given(SEEDS, WORDS, WORDS, st.lists(WORDS, max_size=4 * FEW), st.sampled_from(NoiseStream))
def test_packing_of_counter_and_key(seed: int, choice: int, position: int, ids: list[int], stream: NoiseStream) -> None:
    got = uniform_integers(seed, choice, position, np.array(ids, np.int64), stream)
    assert got.tolist() == by_integers(seed, choice, position, ids, stream)


@pytest.mark.parametrize("count", [0, 1, FEW, FEW + 1, 64, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
@pytest.mark.parametrize("where", [(0, 0, 0), (2**64 - 1, 2**32 - 1, 2**32 - 1), (2**63 + 2**32 + 5, 3, 2**31)])
def test_integers_of_any_number_of_ids(count: int, where: tuple[int, int, int]) -> None:
    ids = np.arange(2**31 - count, 2**31)
    assert uniform_integers(*where, ids).tolist() == by_integers(*where, ids.tolist())


@pytest.mark.parametrize("base", [np.arange(FEW), np.arange(600)], ids=["few", "many"])
@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint32, np.uint64])
def test_ids_of_any_layout_are_taken_and_left_alone(base: noise.Ids, kind: type[np.integer]) -> None:
    table = base.astype(kind).reshape(2, -1)
    for ids in (table, table.T, table[:, ::-1], table[:, ::2], table[0, 0], table[:0], np.asfortranarray(table)):
        before = ids.copy()
        got = uniform_integers(7, 1, 2, ids)
        assert got.shape == gumbel(7, 1, 2, ids).shape == ids.shape
        assert got.reshape(-1).tolist() == by_integers(7, 1, 2, before.reshape(-1).tolist())
        np.testing.assert_array_equal(ids, before)


def test_integers_have_52_bits_and_use_them_all() -> None:
    values = uniform_integers(1, 0, 0, np.arange(4096))
    assert int(values.max()) < 2**52
    assert int(np.bitwise_or.reduce(values)) == 2**52 - 1
    assert int(np.bitwise_and.reduce(values)) == 0


@pytest.mark.parametrize("extreme", [0, 2**52 - 1])
def test_gumbel_is_finite_at_both_ends(extreme: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "uniform_integers", lambda *_: np.array([extreme], np.uint64))
    expected = -math.log(-math.log((extreme + 0.5) / 2**52))
    assert float(gumbel(0, 0, 0, np.array([0]))[0]) == pytest.approx(expected, rel=1e-14)


def test_a_token_s_noise_does_not_depend_on_the_vocabulary_or_the_order() -> None:
    small, large = gumbel(9, 2, 77, np.arange(5)), gumbel(9, 2, 77, np.arange(50_000))
    np.testing.assert_array_equal(small, large[:5])
    some = np.array([[49_999, 3], [3, 0]])
    np.testing.assert_array_equal(gumbel(9, 2, 77, some), large[some])


@pytest.mark.parametrize("count", [FEW, 4096])
def test_gumbel_equals_the_formula_to_the_last_bit(count: int) -> None:
    uniform = (uniform_integers(5, 0, 9, np.arange(count)).astype(np.float64) + 0.5) / 2**52
    np.testing.assert_array_equal(gumbel(5, 0, 9, np.arange(count)), -np.log(-np.log(uniform)))
