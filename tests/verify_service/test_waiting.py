"""Sessions that find no slot wait for one in turn, are told where they wait in vain, and write the same text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specwire.core.invalid import Code
from specwire.core.messages import FinishReason, Outcome
from specwire.core.verify.session import Allowance
from tests.verify_service.rig import COUPLED, Rig, chain, oracle
from verify_service.engine.messages import LinkLost, QueuePatience, TurnAway
from verify_service.metrics import load_of

PROMPT = (7, 3, 9)
WAIT_US = 1e6
HELD_BACK = Allowance(0, 0)


def crowded(waiting: int = 3, slots: int = 1) -> Rig:
    """A rig whose slots are taken by sessions 100, 101, ... that do nothing."""
    rig = Rig(slots=slots, patience=QueuePatience(waiting, WAIT_US))
    for slot in range(slots):
        rig.open(100 + slot, PROMPT, allowance=HELD_BACK, scope=b"a", link=9)
    rig.run()
    return rig


def leave(rig: Rig, handle: int = 100) -> None:
    rig.tick(9, closes=(handle,))


def admitted(rig: Rig) -> list[int]:
    return [each.handle for report in rig.reports for each in report.admitted if each.handle < 100]


@pytest.mark.parametrize("slots", [1, 2])
def test_they_are_served_when_a_slot_comes_free_and_not_told_before(slots: int) -> None:
    rig = crowded(slots=slots)
    for handle in (1, 2):
        rig.open(handle, (*PROMPT, handle), max_tokens=10)
    rig.run()
    assert (admitted(rig), rig.refused, rig.held_slots()) == ([], [], slots + 2)
    leave(rig)
    rig.run()
    # The first to finish is idle, and gives its slot to the second before it is closed.
    assert admitted(rig) == [1, 2]
    assert rig.tokens == {100 + slot: [] for slot in range(slots)} | {
        handle: oracle(rig.lm, (*PROMPT, handle), 10) for handle in (1, 2)
    }


def test_turns_are_by_tenant_then_priority_then_arrival() -> None:
    rig = crowded(waiting=9)
    for handle, scope, priority in ((1, b"a", 0), (2, b"a", 5), (3, b"b", -9), (4, b"a", 5), (5, b"b", 0)):
        rig.open(handle, (*PROMPT, handle), max_tokens=2, scope=scope, priority=priority)
    rig.run()
    leave(rig)
    rig.run()
    assert admitted(rig) == [5, 2, 3, 4, 1]


def test_more_than_may_wait_are_refused_and_told_so() -> None:
    rig = crowded(waiting=2)
    for handle in (1, 2, 3):
        rig.open(handle, PROMPT)
    rig.run()
    assert [(each.handle, each.code) for each in rig.refused] == [(3, Code.RESOURCE_EXHAUSTED)]
    assert rig.refused[0].message == "all 1 slots of this verifier are taken, and 2 sessions wait"


def test_nobody_waits_for_longer_than_the_verifier_lets_them() -> None:
    rig = crowded()
    rig.open(1, PROMPT)
    rest = rig.step()
    assert rest is not None
    assert rig.now < rest.until_us <= rig.now + WAIT_US
    rig.now = rest.until_us
    rig.run()
    assert [(each.handle, each.code) for each in rig.refused] == [(1, Code.RESOURCE_EXHAUSTED)]
    assert rig.refused[0].message == "no slot of this verifier came free within 1 s"
    leave(rig)
    rig.open(2, PROMPT)
    rig.run()
    assert rig.tokens[2] == oracle(rig.lm, PROMPT, 40)


def test_its_own_deadline_ends_one_that_waits() -> None:
    rig = crowded()
    rig.open(1, PROMPT, deadline_us=rig.now + 1000.0)
    rig.run()
    rig.now += 1000.0
    rig.run()
    assert (rig.tokens[1], rig.finished[1], rig.refused) == ([], FinishReason.DEADLINE, [])
    assert rig.held_slots() == 1


def test_one_that_is_closed_or_loses_its_link_waits_no_more() -> None:
    rig = crowded()
    for handle, link in ((1, 1), (2, 2), (3, 3)):
        rig.open(handle, (*PROMPT, handle), link=link, max_tokens=3)
    rig.run()
    rig.tick(1, closes=(1,))
    rig.engine.inbox.put(LinkLost(2))
    leave(rig)
    rig.run()
    assert admitted(rig) == [3]
    assert len(list(rig.engine.roster)) == 1
    assert len(rig.engine.sessions.slot_queue.waiting) == 0


def test_a_verifier_that_is_about_to_stop_sends_elsewhere_who_waits_and_nobody_else() -> None:
    rig = crowded()
    rig.open(1, PROMPT)
    rig.engine.inbox.put(TurnAway("stopping"))
    rig.run()
    assert [(each.handle, each.code, each.message) for each in rig.refused] == [(1, Code.UNAVAILABLE, "stopping")]
    assert rig.held_slots() == 1


@pytest.mark.parametrize(("link", "handle"), [(0, 1), (2, 5)])
def test_one_that_waits_may_be_opened_again(link: int, handle: int) -> None:
    rig = crowded()
    rig.open(1, PROMPT)
    rig.run()
    rig.open(handle, PROMPT, link=link, session_id="session-1", attach=2, decided=(4, 5))
    rig.run()
    leave(rig)
    rig.run()
    assert admitted(rig) == [handle]
    assert rig.tokens[handle] == oracle(rig.lm, (*PROMPT, 4, 5), 38)
    assert [each.handle for each in rig.refused] == ([1] if handle == 5 else [])


def test_what_is_said_to_one_that_waits_counts() -> None:
    """Drafters begin when the session is opened; a chain whose beginning was lost could not go on."""
    rig = crowded()
    truth = oracle(rig.lm, PROMPT, 40, COUPLED)
    rig.open(1, PROMPT, sampling=COUPLED, allowance=HELD_BACK)
    rig.propose(1, chain(0, PROMPT, truth[:20]))
    rig.run()
    rig.tick(progress=((1, Allowance(0, 1 << 20)),))
    leave(rig)
    rig.run()
    assert rig.tokens[1] == truth
    assert rig.outcomes[1].count(Outcome.ACCEPTED) >= 19


def test_time_spent_waiting_is_not_charged() -> None:
    rig = crowded()
    rig.open(1, PROMPT)
    rig.run()
    rig.now += 0.9e6
    leave(rig)
    rig.step()
    held = rig.engine.roster.get(0, 1)
    assert held is not None
    assert held.session.ledger.elapsed_us < 1000.0


def fill(rig: Rig, handles: Sequence[int], **changes: Any) -> None:
    for handle in handles:
        rig.open(handle, (*PROMPT, handle), max_tokens=5, **changes)


def test_a_crowd_passes_through_few_slots_and_loses_nothing() -> None:
    rig = Rig(slots=2, patience=QueuePatience(50, WAIT_US))
    fill(rig, range(1, 30))
    for _ in range(200):
        rig.run()
        done = [handle for handle in rig.finished if rig.engine.roster.get(0, handle)]
        if not done and len(rig.finished) == 29:
            break
        rig.tick(closes=tuple(done))
    assert rig.tokens == {handle: oracle(rig.lm, (*PROMPT, handle), 5) for handle in range(1, 30)}
    assert rig.refused == []


def queue_s(rig: Rig) -> float:
    return round(load_of(rig.engine).queue_s, 2)


def test_how_long_sessions_wait_is_told_and_not_forgotten_at_once() -> None:
    rig = crowded()
    assert load_of(rig.engine).queue_s == 0.0
    rig.open(1, (*PROMPT, 1), max_tokens=2)
    rig.run()
    rig.now += 0.7e6
    assert (queue_s(rig), load_of(rig.engine).waiting) == (0.7, 1)
    leave(rig)
    rig.run()
    assert (queue_s(rig), load_of(rig.engine).waiting) == (0.7, 0)
    rig.now += 2.5e6
    assert queue_s(rig) == 0.7
    rig.now += 2.5e6
    assert queue_s(rig) == 0.0


def test_who_waits_in_vain_has_waited() -> None:
    rig = crowded()
    rig.open(1, PROMPT)
    rig.run()
    rig.now += WAIT_US
    rig.run()
    assert [each.code for each in rig.refused] == [Code.RESOURCE_EXHAUSTED]
    assert queue_s(rig) == WAIT_US / 1e6
