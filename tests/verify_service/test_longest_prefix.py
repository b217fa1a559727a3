"""The longest common prefix is found, never more than it, and by a slot that holds it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from verify_service.engine.slots import LEAST_PREFIX, Prefix, common, longest

BITS = st.lists(st.integers(0, 1), max_size=200)


def by_hand(text: list[int], other: list[int]) -> int:
    length = 0
    while length < min(len(text), len(other)) and text[length] == other[length]:
        length += 1
    return length


@given(BITS, BITS, BITS)
def test_common_is_where_they_first_differ(shared: list[int], one: list[int], other: list[int]) -> None:
    assert common([*shared, *one], [*shared, *other]) == by_hand([*shared, *one], [*shared, *other])


def test_common_at_every_length() -> None:
    text = [random.Random(1).randrange(9) for _ in range(300)]
    for length in range(len(text)):
        assert common(text, [*text[:length], 9, *text[length + 1 :]]) == length
        assert common(text, text[:length]) == length


@given(st.lists(BITS, max_size=5), BITS, st.integers(0, 200))
def test_longest_saves_as_much_as_any_and_leaves_two_tokens(texts: list[list[int]], text: list[int], cut: int) -> None:
    held = [Prefix(slot, other, min(cut, len(other))) for slot, other in enumerate(texts)]
    best = max((min(p.length, by_hand(text, p.tokens), len(text) - 2) for p in held), default=0)
    found = longest(text, held)
    if best < LEAST_PREFIX:
        assert found is None
    else:
        assert found is not None
        prefix, saved = found
        assert saved == best
        assert prefix.length >= saved
        assert prefix.tokens[:saved] == text[:saved]
