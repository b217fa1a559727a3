"""specwire.core.lookout: a batch that takes no guesses looks for them seldom, and again at once when it takes one."""

from __future__ import annotations

from specwire.core.chain import SourceKind
from specwire.core.lookout import IN_VAIN, SELDOM, Lookout
from specwire.core.scheduler import Share

PLAIN = [Share(slot, 1, 0, True) for slot in range(4)]
GUESSED = [*PLAIN[:3], Share(3, 1, 5, True, SourceKind.NGRAM)]
DRAFTED = [*PLAIN[:3], Share(3, 1, 5, True)]


def looked(lookout: Lookout, steps: int, sessions: int = 4) -> list[bool]:
    found = []
    for _ in range(steps):
        found.append(lookout.looks(sessions))
        lookout.planned(PLAIN)
    return found


def test_a_batch_that_takes_no_guess_looks_seldom() -> None:
    assert looked(Lookout(), IN_VAIN + 3 * SELDOM) == [True] * IN_VAIN + ([True] + [False] * (SELDOM - 1)) * 3


def test_one_that_was_taken_is_worth_every_look() -> None:
    lookout = Lookout()
    looked(lookout, IN_VAIN + 1)
    assert not lookout.looks(4)
    lookout.planned(DRAFTED)
    assert not lookout.looks(4)
    lookout.planned(GUESSED)
    assert looked(lookout, IN_VAIN) == [True] * IN_VAIN


def test_a_session_alone_always_looks() -> None:
    assert all(looked(Lookout(), 3 * IN_VAIN, sessions=1))


def test_where_a_session_joins_all_look_again() -> None:
    lookout = Lookout()
    looked(lookout, IN_VAIN + 1)
    assert not lookout.looks(3)
    assert looked(lookout, IN_VAIN) == [True] * IN_VAIN
