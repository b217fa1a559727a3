"""A session that may decide nothing gives its slot up to one that waits, and goes on when it may: the same text."""

from __future__ import annotations

import pytest

from specwire.core.verify.session import Allowance
from tests.verify_service.rig import COUPLED, FAR, Rig, oracle
from verify_service.engine.messages import LinkLost, QueuePatience
from verify_service.engine.sessions import PARK_AFTER_US

PROMPT, OTHER = (7, 3, 9), (4, 4, 8)
DECIDED = 5


def stalled(handles: tuple[int, ...] = (1,)) -> Rig:
    """As many slots as sessions, which have decided all that they may: each has waited a second less than the last."""
    rig = Rig(slots=len(handles), patience=QueuePatience(4, 30e6))
    for handle in handles:
        short = Allowance(0, len(PROMPT) + DECIDED)
        rig.open(handle, PROMPT, link=handle, sampling=COUPLED, allowance=short, scope=b"a", deadline_us=60e6)
        rig.run()
        rig.now += 1e6
    return rig


def crowd(rig: Rig, handle: int = 9) -> None:
    """One more session comes, and as much time passes as the stalled ones are given."""
    rig.open(handle, OTHER, link=handle, scope=b"b")
    rig.run()
    rig.now += PARK_AFTER_US
    rig.run()


def goes_on(rig: Rig, handle: int = 1) -> None:
    rig.tick(link=handle, progress=((handle, FAR),))
    rig.run()
    assert rig.tokens[handle] == oracle(rig.lm, PROMPT, 40, COUPLED)


def admissions(rig: Rig, handle: int) -> int:
    return sum(each.handle == handle for report in rig.reports for each in report.admitted)


def test_it_comes_back_and_nobody_was_told() -> None:
    rig = stalled()
    crowd(rig)
    assert rig.tokens[9] == oracle(rig.lm, OTHER, 40)
    assert len(rig.tokens[1]) == DECIDED
    goes_on(rig)
    assert (rig.refused, admissions(rig, 1), admissions(rig, 9)) == ([], 1, 1)


def test_the_engine_wakes_for_it() -> None:
    rig = stalled()
    rig.open(9, OTHER, link=9)
    rest = rig.step()
    assert rest is not None
    assert rig.now < rest.until_us <= rig.now + PARK_AFTER_US


def test_where_nobody_waits_or_not_for_long_it_keeps_its_slot() -> None:
    rig = stalled()
    rig.now += 10 * PARK_AFTER_US
    rig.run()
    assert [held.waiting for held in rig.engine.roster] == [False]
    goes_on(rig)

    rig = stalled()
    rig.open(9, OTHER, link=9)
    rig.run()
    assert admissions(rig, 9) == 0
    goes_on(rig)


def test_of_several_the_one_that_stands_still_for_longest_goes_first() -> None:
    rig = stalled((1, 2, 3))
    crowd(rig)
    assert [held.handle for held in rig.engine.roster if held.parked] == [1]
    for handle in (1, 2, 3):
        goes_on(rig, handle)


def test_it_waits_for_its_turn_however_long_that_takes() -> None:
    rig = stalled()
    crowd(rig)
    rig.open(10, OTHER, link=10, allowance=Allowance(0, len(OTHER)), scope=b"b")
    rig.run()
    rig.tick(link=1, progress=((1, FAR),))
    for _ in range(4):
        rig.now += PARK_AFTER_US / 2
        rig.tick(link=10, progress=((10, Allowance(0, len(OTHER) + len(rig.tokens[10]) + 1)),))
        rig.run()
    assert (len(rig.tokens[1]), rig.refused) == (DECIDED, [])
    rig.tick(link=10, closes=(10,))
    rig.run()
    assert rig.tokens[1] == oracle(rig.lm, PROMPT, 40, COUPLED)


@pytest.mark.parametrize("how", ["closed", "lost"])
def test_one_that_is_closed_or_loses_its_link_is_gone(how: str) -> None:
    rig = stalled()
    crowd(rig)
    if how == "closed":
        rig.tick(link=1, closes=(1,))
    else:
        rig.engine.inbox.put(LinkLost(1))
    rig.run()
    assert [held.handle for held in rig.engine.roster] == [9]


def test_another_connection_goes_on_from_the_log() -> None:
    rig = stalled()
    crowd(rig)
    decided = rig.tokens[1]
    rig.open(5, PROMPT, link=5, session_id="session-1", attach=2, sampling=COUPLED, decided=decided)
    rig.run()
    assert [*decided, *rig.tokens[5]] == oracle(rig.lm, PROMPT, 40, COUPLED)
