"""The index against a search through the whole text, and what is learnt from guesses that nobody tested."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from specwire.core.policy.tunables import READ_AT_ONCE, VOTES
from specwire.core.verify.text_sources import LEAST_NGRAM, MOST_NGRAM, REACH, Match, NgramIndex, NgramSource

# Few different tokens, so that texts repeat.
TEXTS = st.lists(st.integers(0, 3), max_size=80)


def searched(text: Sequence[int]) -> Match | None:
    """What `NgramIndex.match` promises, by brute force."""
    for n in range(MOST_NGRAM, LEAST_NGRAM - 1, -1):
        ends = [end for end in range(n, len(text)) if text[end - n : end] == text[len(text) - n :]]
        if ends and n < MOST_NGRAM:
            return Match(ends[-1], n)
        if ends:
            return max((Match(end, agreeing(text, end)) for end in ends[-VOTES:]), key=lambda m: (m.length, m.end))
    return None


def proposed(index: NgramIndex, most: int) -> tuple[int, ...]:
    found = index.find(most)
    return () if found is None else found.tokens


def agreeing(text: Sequence[int], end: int) -> int:
    lengths = [n for n in range(1, min(end, REACH) + 1) if text[end - n : end] == text[len(text) - n :]]
    return lengths[-1]


def continued(text: Sequence[int], match: Match, most: int) -> tuple[int, ...]:
    """Token by token: each one also becomes part of what is copied from."""
    grown = list(text)
    for index in range(most):
        grown.append(grown[match.end + index])
    return tuple(grown[len(text) :])


@given(TEXTS, st.lists(st.integers(1, 9), max_size=30), st.integers(1, 20))
def test_finds_what_a_search_finds_however_the_text_grew(text: list[int], pieces: list[int], most: int) -> None:
    grown: list[int] = []
    index = NgramIndex(grown)
    for piece in [*pieces, len(text)]:
        grown += text[len(grown) : len(grown) + piece]
        index.read()
        found = searched(grown)
        assert index.match() == found
        assert proposed(index, most) == (() if found is None else continued(grown, found, most))


@given(TEXTS, st.integers(1, 7))
def test_read_in_parts_it_knows_the_parts(text: list[int], most: int) -> None:
    index, whole = NgramIndex(text), NgramIndex(text)
    for _ in range(len(text)):
        index.read(most)
    whole.read()
    assert index.complete
    assert index.match() == whole.match()


def test_a_long_text_is_read_in_bounded_parts() -> None:
    text = list(range(3 * READ_AT_ONCE))
    index = NgramIndex(text)
    index.read()
    assert index.done == READ_AT_ONCE
    assert not index.complete


def test_a_guess_is_judged_without_having_been_tested() -> None:
    phrase = list(range(10, 30))
    text = [*phrase, *phrase[:6]]
    source = NgramSource(text, 4)
    guess = source.look()
    assert guess is not None
    assert guess.tokens == (16, 17, 18, 19)
    believed = guess.acceptance.rates(3)
    text += [16, 17]
    source.text_grew()
    source.look()
    assert guess.acceptance.rates(3) == believed, "not settled yet: nothing contradicts it, two of its tokens are open"
    text.append(99)
    source.text_grew()
    first, second, third = guess.acceptance.rates(3)
    assert first > believed[0]
    assert second > believed[1]
    assert third < second


def test_weak_and_strong_matches_are_told_apart() -> None:
    weak = NgramSource([1, 2, 3, 9, 2, 3], 4).look()
    strong = NgramSource([*range(20), *range(20)], 4).look()
    assert weak is not None
    assert strong is not None
    assert weak.acceptance.rates(1)[0] < 0.5 < strong.acceptance.rates(1)[0]
