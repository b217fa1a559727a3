"""What a lost connection leaves: the latest verdicts, cut to what the next one lacks."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from specwire.core.messages import FinishReason, Outcome, Verdict
from specwire.core.verify.session import Tail

A, R = Outcome.ACCEPTED, Outcome.RECOVERED


def verdict(position: int, *tokens: int, finish: FinishReason | None = None) -> Verdict:
    """All accepted but the last, as a verdict of a window that is one wider is."""
    outcomes = (*(A,) * (len(tokens) - 1), R) if tokens else ()
    return Verdict(position, tokens, outcomes, len(tokens), finish)


def tail_of(*verdicts: Verdict) -> Tail:
    tail = Tail()
    for each in verdicts:
        tail.add(each)
    return tail


def tokens_of(verdicts: Sequence[Verdict] | None) -> list[int]:
    assert verdicts is not None
    return [token for each in verdicts for token in each.tokens]


def test_the_end_is_told_however_much_is_durable() -> None:
    tail = tail_of(verdict(5, 1), verdict(6, 2, finish=FinishReason.EOS))
    tail.forget(7)
    assert tail.behind(7, 7) == [Verdict(7, (), (), 0, FinishReason.EOS)]


@given(st.lists(st.integers(1, 5), max_size=6), st.integers(0, 40), st.integers(0, 40))
def test_it_is_whole_or_nothing(sizes: list[int], durable: int, position: int) -> None:
    tail, end = Tail(), 3
    for size in sizes:
        tail.add(verdict(end, *range(end, end + size)))
        end += size
    tail.forget(durable)
    position = min(position, end)
    behind = tail.behind(position, end)
    if behind is None:
        assert position < max(3, durable)
    else:
        assert tokens_of(behind) == list(range(position, end))
