"""specwire.core.policy.windows: whose guesses are not taken is looked through ever more seldom."""

from __future__ import annotations

from itertools import pairwise

import pytest

from specwire.core.messages import SourceKind
from specwire.core.policy.windows import LearntRest, LearntRests, Lookout, Share, longest_rest

PLAIN = Share(3, 1, 0, True)
GUESSED = Share(3, 1, 5, True, SourceKind.NGRAM)
DRAFTED = Share(3, 1, 5, True)
LONGEST = 10


def looked(lookout: Lookout, steps: int, share: Share = PLAIN, right_since: int = 0) -> list[bool]:
    found = []
    for _ in range(steps):
        found.append(lookout.looks(right_since))
        lookout.planned(share, found[-1], LONGEST)
    return found


def rests(found: list[bool]) -> list[int]:
    """Plans without a look behind each look."""
    at = [index for index, look in enumerate(found) if look]
    return [after - before - 1 for before, after in pairwise(at)]


@pytest.mark.parametrize(
    ("sessions", "plain_us", "plans"), [(1, 1_000.0, 20), (1, 30_000.0, 1), (16, 4_000.0, 80), (16, 40_000.0, 8)]
)
def test_looks_in_vain_take_a_hundredth_of_the_time(sessions: int, plain_us: float, plans: int) -> None:
    """A look takes up to 200 microseconds, for which all sessions wait."""
    assert longest_rest(sessions, plain_us) == plans


def test_whose_guesses_are_not_taken_is_looked_through_ever_more_seldom() -> None:
    assert rests(looked(Lookout(LearntRest()), 60)) == [0, 1, 2, 4, 8, LONGEST, LONGEST, LONGEST]


def test_one_that_was_taken_is_looked_through_at_once_and_then_seldom_again_the_sooner_the_less_was_taken() -> None:
    """Where one guess of many is taken, all the looks behind each would cost a batch more than it gains."""
    lookout = Lookout(LearntRest())
    looked(lookout, 60)
    while not lookout.looks():
        pass
    lookout.planned(GUESSED, True, LONGEST)
    assert rests(looked(lookout, 40)) == [2, 4, 8, LONGEST, LONGEST]
    for _ in range(4):
        while not lookout.looks():
            pass
        lookout.planned(GUESSED, True, LONGEST)
    assert rests(looked(lookout, 60)) == rests(looked(Lookout(LearntRest()), 60)), "where all are, it repeats"


def test_a_window_of_a_drafter_s_is_no_guess_taken() -> None:
    assert rests(looked(Lookout(LearntRest()), 60, share=DRAFTED)) == rests(looked(Lookout(LearntRest()), 60))


def test_a_text_that_goes_on_as_the_last_guess_said_is_looked_through_at_once() -> None:
    lookout = Lookout(LearntRest())
    looked(lookout, 60)
    while not lookout.looks():
        pass
    lookout.planned(PLAIN, True, LONGEST)
    assert not any(looked(lookout, 3, right_since=3))
    assert looked(lookout, 4, right_since=4) == [True, False, False, False], "it repeats, and does not pay"
    assert looked(lookout, 3, right_since=8) == [True, False, False]
    lookout.planned(GUESSED, True, LONGEST)
    looked(lookout, 20)
    while not lookout.rests:
        looked(lookout, 1)
    assert looked(lookout, 1, right_since=4) == [True], "it may have begun to repeat anew"


def test_a_prompt_s_chunks_are_not_in_vain() -> None:
    lookout = Lookout(LearntRest())
    assert all(looked(lookout, 60, share=Share(3, 512, 0, False)))
    assert rests(looked(lookout, 60)) == rests(looked(Lookout(LearntRest()), 60))


def test_a_new_session_begins_as_those_before_it_ended() -> None:
    learnt = LearntRest()
    looked(Lookout(learnt), 60)
    assert rests(looked(Lookout(learnt), 60)) == [LONGEST] * 5
    looked(Lookout(learnt), 60, share=GUESSED)
    assert rests(looked(Lookout(learnt), 60))[:4] == [0, 1, 2, 4], "guesses of another one were taken"


def test_what_was_learnt_stays_within_its_scope() -> None:
    rests = LearntRests(2)
    learnt = rests.of(b"ours", shared=True, drawn=False)
    assert rests.of(b"ours", shared=True, drawn=False) is learnt
    others = [rests.of(b"ours", False, False), rests.of(b"ours", True, True), rests.of(b"theirs", True, False)]
    assert all(each is not learnt for each in others)
    assert rests.of(b"", True, False) is not rests.of(b"", True, False), "without a scope there is nobody to share with"
    assert rests.of(b"ours", True, False) is learnt
    rests.of(b"another", True, False)
    assert rests.of(b"ours", True, False) is learnt
    assert rests.of(b"theirs", True, False) is not others[-1], "it was used least recently"
