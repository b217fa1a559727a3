"""When a verifier's drafters answer, from their own history."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specwire.core.law.sampling import Sampling
from specwire.core.messages import AssignedDrafter, Proposal
from specwire.core.policy.drafters import DrafterPacing, Due, LearntDrafter, PlannedStep
from specwire.core.text import Ending
from specwire.core.verify.session import Allowance, VerifySession

PLAIN = 1000.0


def pacing(plan: str = "lockstep:1", shares_cores: bool = False, source: int = 1) -> DrafterPacing:
    return DrafterPacing(AssignedDrafter(source, "d", shares_cores, plan), LearntDrafter())


def chunk(base: int, tokens: int = 1, offset: int = 0, draft_us: int = 0) -> Proposal:
    return Proposal(1, base, base, offset, (1,) * tokens, 0, draft_us=draft_us)


def answered(delay: float, times: int = 20) -> DrafterPacing:
    """Each verdict ends one position further, and a new chain answers it `delay` later; one more verdict at 100,000."""
    drafter = pacing()
    for index in range(times):
        drafter.asked(index, 1000.0 * index)
        drafter.proposed(chunk(index), 1000.0 * index + delay)
    drafter.asked(times, 100_000.0)
    return drafter


def expected(drafter: DrafterPacing) -> Due:
    due = drafter.due(PLAIN)
    assert due is not None
    return due


def test_nothing_is_due_before_the_first_verdict_or_of_one_that_is_not_asked() -> None:
    assert pacing().due(PLAIN) is None
    idle = pacing("stream:1,8,0")
    idle.asked(5, 0.0)
    assert idle.due(PLAIN) is None


def test_an_answer_of_which_nothing_is_known_may_come_soon_or_late() -> None:
    drafter = pacing()
    drafter.asked(5, 0.0)
    assert expected(drafter) == (125.0, 500.0, 1.0)


def test_answer_to_an_older_verdict_is_measured_from_that_one() -> None:
    drafter = pacing()
    drafter.asked(5, 0.0)
    drafter.asked(6, 1000.0)
    drafter.proposed(chunk(5), 1200.0)
    assert drafter.learnt.overhead_us == 1200.0
    drafter.proposed(chunk(5, offset=4), 1300.0)
    assert drafter.learnt.overhead_us == 1200.0, "it goes on"


def test_dead_proposal_teaches_the_delay_but_is_no_answer() -> None:
    drafter = pacing()
    drafter.asked(5, 0.0)
    drafter.asked(6, 1000.0)
    drafter.proposed(chunk(5), 1200.0, live=False)
    assert drafter.learnt.overhead_us == 1200.0
    assert drafter.due(PLAIN) is not None


def test_one_that_tells_no_time_is_planned_as_quick_until_it_tells() -> None:
    """Clients of other makers may leave it out; the first time that is told counts whole."""
    drafter = pacing("auto")
    drafter.proposed(chunk(0, 4), 100.0)
    drafter.proposed(chunk(4, 4), 200.0)
    assert drafter.learnt.draft_us == 0.0
    drafter.verdict(0, PlannedStep(1, lambda _sessions: lambda _rows: 1000.0, 1e6))
    assert drafter.plan.reason.startswith("gain ")
    drafter.proposed(chunk(8, 4, draft_us=32_000), 300.0)
    assert drafter.learnt.draft_us == 8_000.0


def test_one_that_was_thought_too_quick_is_waited_for_longer_though_it_came_late_each_time() -> None:
    drafter = pacing("lockstep:2", shares_cores=True)
    drafter.learnt.draft_us = 3_000.0
    for position in range(40):
        begun = 100_000.0 * position
        drafter.asked(position, begun)
        late = begun + expected(drafter).latest_us - begun < begun + 9_000.0
        drafter.proposed(chunk(position, 2), begun + 9_000.0, forwards=[(begun + 6_000.0, begun + 50_000.0)] * late)
    drafter.asked(40, 1e7)
    assert expected(drafter).latest_us >= 1e7 + 9_000.0


def test_chance_falls_with_every_verdict_that_came_first_and_rises_again() -> None:
    drafter = answered(300.0)
    for index in range(10):
        drafter.asked(21 + index, 200_000.0 + 1000.0 * index)
    assert expected(drafter).chance < 0.2
    for index in range(10):
        now = 300_000.0 + 1000.0 * index
        drafter.asked(40 + index, now)
        drafter.proposed(chunk(40 + index), now + 300.0)
    drafter.asked(60, 400_000.0)
    assert expected(drafter).chance > 0.8


# Several sources


def heard(*delays: float, verdicts: int = 20) -> VerifySession:
    """Each verdict ends one position further; source 1, 2, ... answers each with a new chain, `delays` later."""
    ending = Ending(400, frozenset(), frozenset())
    session = VerifySession.opened([1], 1, Sampling(), ending, Allowance(400, 400), 100)
    session.drafters = {source: pacing(source=source) for source, _ in enumerate(delays, 1)}
    for index in range(verdicts):
        say(session, index, 10_000.0 * index, delays)
    say(session, verdicts, 1e6, ())
    return session


def say(session: VerifySession, end: int, now: float, delays: Sequence[float]) -> None:
    for drafter in session.drafters.values():
        drafter.asked(end, now)
    for source, delay in enumerate(delays, 1):
        session.drafters[source].proposed(chunk(end), now + delay)


def test_each_source_has_a_delay_of_its_own_and_the_first_is_waited_for() -> None:
    awaited = heard(3000.0, 300.0).awaited(PLAIN)
    assert awaited is not None
    source, due = awaited
    assert source == 2
    assert due.expected_us == pytest.approx(1e6 + 300.0, abs=1)


def test_when_one_has_answered_the_other_is_due() -> None:
    session = heard(3000.0, 300.0)
    session.drafters[2].proposed(chunk(20), 1e6 + 300.0)
    awaited = session.awaited(PLAIN)
    assert awaited is not None
    assert awaited[0] == 1
    session.drafters[1].proposed(chunk(20), 1e6 + 3000.0)
    assert session.awaited(PLAIN) is None


def test_one_that_is_gone_is_not_waited_for_long() -> None:
    session = heard(3000.0, 300.0)
    for index in range(10):
        say(session, 21 + index, 2e6 + 10_000.0 * index, (3000.0,))
    say(session, 40, 3e6, ())
    awaited = session.awaited(PLAIN)
    assert awaited is not None
    assert awaited[0] == 1
