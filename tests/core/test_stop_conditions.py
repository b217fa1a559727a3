"""What ends a text, and which requests are refused."""

from __future__ import annotations

import pytest

from specwire.core.invalid import InvalidParameter, check_prompt
from specwire.core.messages import FinishReason
from specwire.core.text import MOST_STOP_IDS, Ending, Stopping

ENDING = Ending(end=10, eos_ids=frozenset({0}), stop_ids=frozenset({7}))


@pytest.mark.parametrize(
    ("position", "tokens", "kept", "reason"),
    [
        (4, (), 0, None),
        (4, (1, 2), 2, None),
        (4, (0,), 1, FinishReason.EOS),
        (4, (1, 0, 2, 3), 2, FinishReason.EOS),
        (4, (1, 7, 0), 2, FinishReason.STOP_ID),
        (4, (0, 7), 1, FinishReason.EOS),
        (8, (1,), 1, None),
        (8, (1, 2), 2, FinishReason.LENGTH),
        (8, (1, 2, 3), 2, FinishReason.LENGTH),
        (8, (1, 0, 3), 2, FinishReason.EOS),
        (0, (1,), 1, None),
    ],
)
def test_nothing_follows_the_end(
    position: int, tokens: tuple[int, ...], kept: int, reason: FinishReason | None
) -> None:
    """Also inside an accepted run; EOS 0 is an id like any other; the last token may be both last and EOS."""
    assert ENDING.cut(position, tokens) == (kept, reason)


def test_an_id_that_is_eos_and_stop_id_is_eos() -> None:
    assert Ending(9, frozenset({3}), frozenset({3})).cut(0, (3,)) == (1, FinishReason.EOS)


@pytest.mark.parametrize(("max_tokens", "context", "end"), [(5, 100, 9), (5, 7, 7), (96, 100, 100), (1, 100, 5)])
def test_end_is_max_tokens_or_the_context(max_tokens: int, context: int, end: int) -> None:
    assert Ending.of(Stopping(max_tokens), 4, frozenset({1}), context).end == end


def test_ignore_eos_keeps_the_stop_ids() -> None:
    ending = Ending.of(Stopping(5, frozenset({7}), ignore_eos=True), 4, frozenset({1}), 100)
    assert ending.cut(4, (1, 1)) == (2, None)
    assert ending.cut(4, (1, 7)) == (2, FinishReason.STOP_ID)


@pytest.mark.parametrize("max_tokens", [0, -3])
def test_max_tokens_below_one_is_refused(max_tokens: int) -> None:
    with pytest.raises(InvalidParameter, match=f"max_tokens: .*{max_tokens}"):
        Stopping(max_tokens)


def test_too_many_stop_ids_are_refused() -> None:
    Stopping(1, frozenset(range(MOST_STOP_IDS)))
    with pytest.raises(InvalidParameter, match=f"stop_ids: .*{MOST_STOP_IDS + 1}"):
        Stopping(1, frozenset(range(MOST_STOP_IDS + 1)))


@pytest.mark.parametrize(
    ("tokens", "said"),
    [([], "empty"), ([1] * 8, "8 tokens"), ([1, 50], "token id 50"), ([-1], "token id -1")],
)
def test_bad_prompts_are_refused(tokens: list[int], said: str) -> None:
    with pytest.raises(InvalidParameter, match=f"prompt: .*{said}"):
        check_prompt(tokens, vocabulary=50, context=8)


@pytest.mark.parametrize("tokens", [[0], [49], [0] * 7])
def test_good_prompts_pass(tokens: list[int]) -> None:
    check_prompt(tokens, vocabulary=50, context=8)
