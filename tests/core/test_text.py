"""Texts by absolute position and the hash of every prefix."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specwire.core.text import Text, extend_hash, hash_of

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


@given(TOKENS, TOKENS, st.integers(0, 14))
def test_common_prefix(tokens: list[int], other: list[int], position: int) -> None:
    there = tokens[position:]
    expected = next(
        (i for i, (a, b) in enumerate(zip(there, other, strict=False)) if a != b), min(len(there), len(other))
    )
    assert Text(tokens).common_prefix(position, other) == expected
