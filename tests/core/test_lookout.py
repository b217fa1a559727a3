"""Whose texts are searched for guesses."""

from __future__ import annotations

from specwire.core.policy.tunables import LOOK_EVERY_US, SHORT_CHAIN
from specwire.core.policy.windows import Searchable, searched


def test_a_text_is_searched_while_guesses_are_used_or_still_right() -> None:
    last = SHORT_CHAIN - 1
    known = [Searchable(2, last, 0), Searchable(5, 99, SHORT_CHAIN), Searchable(7, SHORT_CHAIN, last)]
    assert searched(known) == {2, 5}


def test_each_is_searched_now_and_then_the_more_seldom_the_more_there_are() -> None:
    for sessions in (1, 4):
        known = [Searchable(slot, 99, 0, sessions * LOOK_EVERY_US - (slot > 0)) for slot in range(sessions)]
        assert searched(known) == {0}
