"""specwire.core.policy.windows: texts are searched where guesses are used, others now and then."""

from __future__ import annotations

import pytest

from specwire.core.policy.tunables import LOOK_EVERY_US, SHORT_CHAIN
from specwire.core.policy.windows import Lookout, Searchable


def unused(*slots: int) -> list[Searchable]:
    return [Searchable(slot, SHORT_CHAIN, 0) for slot in slots]


def test_a_text_is_searched_in_each_step_while_guesses_are_used_or_still_right() -> None:
    lookout = Lookout()
    known = [
        Searchable(2, SHORT_CHAIN - 1, 0),
        Searchable(5, 99, SHORT_CHAIN),
        Searchable(7, SHORT_CHAIN, SHORT_CHAIN - 1),
    ]
    assert [lookout.searched(known, 1.0) for _ in range(3)] == [{2, 5}] * 3


@pytest.mark.parametrize(("sessions", "plain_us"), [(1, 1_000.0), (1, 30_000.0), (16, 4_000.0), (16, 40_000.0)])
def test_looks_in_vain_take_a_hundredth_of_the_time(sessions: int, plain_us: float) -> None:
    """A look takes up to 200 microseconds, for which all sessions wait."""
    lookout, steps = Lookout(), 1000
    looks = sum(len(lookout.searched(unused(*range(sessions)), plain_us)) for _ in range(steps))
    assert looks == pytest.approx(steps * min(sessions, plain_us / LOOK_EVERY_US), rel=0.02)


def test_they_take_turns_whoever_comes_and_goes() -> None:
    lookout = Lookout()
    steps = [unused(0, 1, 2), unused(0, 1, 2), unused(0, 2), unused(0, 1, 2, 3), unused(0, 1, 2, 3), unused(0, 1)]
    assert [lookout.searched(known, LOOK_EVERY_US) for known in steps] == [{0}, {1}, {2}, {3}, {0}, {1}]


def test_no_more_looks_are_saved_up_than_one_each() -> None:
    lookout = Lookout()
    for _ in range(100):
        lookout.searched(unused(0, 1), 10 * LOOK_EVERY_US)
    assert [len(lookout.searched(unused(0, 1, 2), LOOK_EVERY_US)) for _ in range(4)] == [1] * 4


def test_when_a_text_is_searched_does_not_tell_whether_others_repeat() -> None:
    found = []
    for others in (0, SHORT_CHAIN):
        lookout = Lookout()
        known = [Searchable(0, SHORT_CHAIN, 0), *[Searchable(slot, others, 0) for slot in range(1, 4)]]
        found.append([0 in lookout.searched(known, LOOK_EVERY_US / 2) for _ in range(40)])
    assert found[0] == found[1]
    assert sum(found[0]) == 5
