"""Texts by absolute position and the hash of every prefix."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specwire.core.text import EMPTY_HASH, Text, extend_hash, hash_of

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=12)
WORD = 2**64


def splitmix(value: int, token: int) -> int:
    """The formula of PROTOCOL.md, written down a second time."""
    z = ((value ^ (token + 1)) + 0x9E3779B97F4A7C15) % WORD
    z = (z ^ z // 2**30) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ z // 2**27) * 0x94D049BB133111EB % WORD
    return z ^ z // 2**31


@given(st.integers(0, WORD - 1), st.integers(0, 2**32 - 1))
def test_hash_is_the_documented_formula(value: int, token: int) -> None:
    assert extend_hash(value, token) == splitmix(value, token) < WORD


def test_token_zero_and_length_count() -> None:
    hashes = [hash_of(tokens) for tokens in ([], [0], [0, 0], [1], [0, 1], [1, 0])]
    assert len(set(hashes)) == len(hashes)
    assert hashes[0] == EMPTY_HASH


def test_no_collision_among_all_short_texts() -> None:
    texts = [(a, b, c) for a in range(24) for b in range(24) for c in range(24)]
    assert len({hash_of(text) for text in texts}) == len(texts)


@given(TOKENS, TOKENS, st.integers(0, 14))
def test_hashes_follow_extension_and_truncation(first: list[int], second: list[int], length: int) -> None:
    text = Text(first)
    text.truncate(length)
    text.extend(second)
    expected = first[:length] + second
    assert text.tokens == expected
    assert len(text) == len(expected)
    assert [text.hash_at(p) for p in range(len(expected) + 1)] == [
        hash_of(expected[:p]) for p in range(len(expected) + 1)
    ]


def test_truncating_to_zero_leaves_an_empty_text() -> None:
    text = Text([1, 2])
    text.truncate(0)
    assert (text.tokens, text.hash_at(0)) == ([], EMPTY_HASH)


@given(TOKENS, TOKENS, st.integers(0, 14))
def test_common_prefix(tokens: list[int], other: list[int], position: int) -> None:
    there = tokens[position:]
    expected = next(
        (i for i, (a, b) in enumerate(zip(there, other, strict=False)) if a != b), min(len(there), len(other))
    )
    assert Text(tokens).common_prefix(position, other) == expected


def test_common_prefix_takes_token_zero_for_a_token() -> None:
    assert Text([0, 0, 5]).common_prefix(0, [0, 0, 5, 7]) == 3
    assert Text([0, 0, 5]).common_prefix(1, [0, 0]) == 1
    assert Text([0]).common_prefix(1, [0]) == 0
