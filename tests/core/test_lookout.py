"""specwire.core.policy.windows: in a batch, whose guesses are not taken is looked through ever more seldom."""

from __future__ import annotations

from itertools import pairwise

from specwire.core.messages import SourceKind
from specwire.core.policy.tunables import MOST_REST
from specwire.core.policy.windows import Lookout, Share

PLAIN = Share(3, 1, 0, True)
GUESSED = Share(3, 1, 5, True, SourceKind.NGRAM)
DRAFTED = Share(3, 1, 5, True)


def looked(lookout: Lookout, steps: int, alone: bool = False, share: Share = PLAIN) -> list[bool]:
    found = []
    for _ in range(steps):
        found.append(lookout.looks(alone))
        lookout.planned(share, found[-1])
    return found


def rests(found: list[bool]) -> list[int]:
    """Plans without a look behind each look."""
    at = [index for index, look in enumerate(found) if look]
    return [after - before - 1 for before, after in pairwise(at)]


def test_whose_guesses_are_not_taken_is_looked_through_ever_more_seldom() -> None:
    assert rests(looked(Lookout(), 60)) == [0, 1, 2, 4, *[MOST_REST] * 5]


def test_one_that_was_taken_is_worth_every_look() -> None:
    lookout = Lookout()
    looked(lookout, 60)
    while not lookout.looks(alone=False):
        pass
    lookout.planned(GUESSED, looked=True)
    assert rests(looked(lookout, 60)) == rests(looked(Lookout(), 60))


def test_a_window_of_a_drafter_s_is_no_guess_taken() -> None:
    assert rests(looked(Lookout(), 60, share=DRAFTED)) == rests(looked(Lookout(), 60))


def test_a_session_alone_always_looks() -> None:
    assert all(looked(Lookout(), 60, alone=True))


def test_a_prompt_s_chunks_are_not_in_vain() -> None:
    lookout = Lookout()
    assert all(looked(lookout, 60, share=Share(3, 512, 0, False)))
    assert rests(looked(lookout, 60)) == rests(looked(Lookout(), 60))


def test_what_was_in_vain_alone_is_forgotten_where_a_guess_is_taken_before_others_come() -> None:
    lookout = Lookout()
    looked(lookout, 60, alone=True)
    looked(lookout, 1, alone=True, share=GUESSED)
    assert rests(looked(lookout, 60)) == rests(looked(Lookout(), 60))
