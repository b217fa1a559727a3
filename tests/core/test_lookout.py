"""specwire.core.lookout: in a batch, whose guesses are not taken is looked through seldom, and at once when one is."""

from __future__ import annotations

from specwire.core.chain import SourceKind
from specwire.core.lookout import IN_VAIN, SELDOM, Lookout
from specwire.core.scheduler import Share

PLAIN = Share(3, 1, 0, True)
GUESSED = Share(3, 1, 5, True, SourceKind.NGRAM)
DRAFTED = Share(3, 1, 5, True)


def looked(lookout: Lookout, steps: int, alone: bool = False) -> list[bool]:
    found = []
    for _ in range(steps):
        found.append(lookout.looks(alone))
        lookout.planned(PLAIN)
    return found


def test_whose_guesses_are_not_taken_is_looked_through_seldom() -> None:
    assert looked(Lookout(), IN_VAIN + 3 * SELDOM) == [True] * IN_VAIN + ([True] + [False] * (SELDOM - 1)) * 3


def test_one_that_was_taken_is_worth_every_look() -> None:
    lookout = Lookout()
    looked(lookout, IN_VAIN + 1)
    assert not lookout.looks(alone=False)
    lookout.planned(DRAFTED)
    assert not lookout.looks(alone=False)
    lookout.planned(GUESSED)
    assert looked(lookout, IN_VAIN) == [True] * IN_VAIN


def test_a_session_alone_always_looks() -> None:
    assert all(looked(Lookout(), 3 * IN_VAIN, alone=True))


def test_a_prompt_s_chunks_are_not_in_vain() -> None:
    lookout = Lookout()
    for _ in range(3 * IN_VAIN):
        lookout.planned(Share(3, 512, 0, False))
    assert looked(lookout, IN_VAIN) == [True] * IN_VAIN
