"""The scanner cuts where a whole-text search would, however the text is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specwire.core.invalid import InvalidParameter
from specwire.text import MOST_STOP_CHARACTERS, MOST_STOPS, StopScanner


def oracle(text: str, stops: list[str]) -> int | None:
    """Where the text is cut: the stop completed first, of those the one that starts first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


@settings(max_examples=500, deadline=None)
@given(
    parts=st.lists(st.text("ab.", max_size=5), max_size=10),
    stops=st.lists(st.text("ab.", min_size=1, max_size=5), max_size=4),
)
def test_agrees_with_a_search_of_the_whole_text(parts: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    results = [scanner.push(part) for part in parts]
    released = "".join(text for text, _ in results) + scanner.flush()
    text = "".join(parts)
    cut = oracle(text, stops)
    assert scanner.stopped_at == cut
    assert released == text[:cut]


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab", max_size=20), stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_holds_back_exactly_what_may_begin_a_stop(text: str, stops: list[str]) -> None:
    scanner = StopScanner(stops)
    released = "".join(scanner.push(character)[0] for character in text)
    if scanner.stopped_at is None:
        rest = text[len(released) :]
        suffixes = (text[start:] for start in range(len(text) + 1))
        assert rest == next(tail for tail in suffixes if any(stop.startswith(tail) for stop in stops))


def test_the_completed_one_wins_over_one_that_started_earlier() -> None:
    scanner = StopScanner(["abcdef", "cd"])
    assert scanner.push("xabcd") == ("xab", 3)


def test_of_two_completed_together_the_earlier_start_wins() -> None:
    scanner = StopScanner(["d", "bcd"])
    assert scanner.push("abcd") == ("a", 1)
    assert scanner.push("more") == ("", 1)
    assert scanner.flush() == ""


def test_offsets_are_code_points() -> None:
    scanner = StopScanner(["🙂!"])
    assert [scanner.push(part) for part in ("é🙃", "🙂", "!")] == [("é🙃", None), ("", None), ("", 2)]


def test_bad_stops_are_named() -> None:
    for bad in ([""], ["x"] * (MOST_STOPS + 1), ["x" * (MOST_STOP_CHARACTERS + 1)]):
        with pytest.raises(InvalidParameter, match="stop: "):
            StopScanner(bad)
