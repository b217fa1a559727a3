"""How a verifier plans its sessions' drafters: what is expected of each way, what is learnt, when it is tried again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specwire.core.messages import MOST_WINDOW, PROBE_WINDOW, AssignedDrafter, Discipline, Proposal
from specwire.core.policy.costs import StepCosts
from specwire.core.policy.drafters import DrafterPacing, LearntDrafter, LearntDrafters, PlannedStep
from specwire.core.policy.estimates import ForwardTimes
from specwire.core.policy.tunables import ENOUGH, EXPLORED_SHARE, TRIAL_VERDICTS

PLAIN_US, RICH_US = 10_000.0, 1e9
COSTS = StepCosts(ForwardTimes({1: PLAIN_US, 17: 1.5 * PLAIN_US}))


def step(sessions: int = 1, spare_us: float = RICH_US, lost_us: float = 0.0) -> PlannedStep:
    return PlannedStep(sessions, COSTS.of, spare_us, lost_us)


STEP = step()


class Played:
    """A drafter of one session: it answers each verdict with a chunk, of which so many tokens are right."""

    def __init__(
        self,
        shares_cores: bool,
        learnt: LearntDrafter | None = None,
        weighed: bool = False,
        waits: bool = True,
    ) -> None:
        self.learnt = learnt or LearntDrafter()
        self.pacing = DrafterPacing(AssignedDrafter(1, "d", shares_cores), self.learnt, weighed, waits)
        self._chains = 0

    @property
    def discipline(self) -> Discipline:
        return self.pacing.plan.discipline

    def turn(self, accepted: int, draft_us: int = 500, overhead_us: float = 100.0, at: PlannedStep = STEP) -> None:
        pace = self.pacing.plan.pace
        width = min(MOST_WINDOW, pace.chunk)
        if pace.run_ahead:
            self._chains += 1
            spent_us = draft_us * width
            proposal = Proposal(1, self._chains, self._chains, 0, (1,) * width, 0, draft_us=spent_us)
            self.pacing.asked(self._chains, 0.0)
            self.pacing.proposed(proposal, spent_us + overhead_us)
            self.learnt.agreement.observe(min(width, accepted), accepted < width)
            self.pacing.tested(width, min(width, accepted))
        self.pacing.verdict(width if pace.run_ahead else 0, at)

    def turns(self, times: int, accepted: Callable[[int], int], **told: object) -> None:
        for at in range(times):
            self.turn(accepted(at), **told)  # type: ignore[arg-type]  # by name


def always(tokens: int) -> Callable[[int], int]:
    return lambda _: tokens


# ----------------------------------------------------------------------------------------------------------------------
# On cores of its own.


def test_a_good_drafter_near_by_streams_and_one_that_is_never_right_is_off() -> None:
    good, poor = Played(False), Played(False)
    good.turns(100, always(MOST_WINDOW))
    poor.turns(100, always(0))
    assert good.discipline in (Discipline.STREAM, Discipline.LOCKSTEP)
    assert good.pacing.plan.due > 0
    assert "gain" in good.pacing.plan.reason
    assert str(poor.pacing.plan) == "off: no gain expected"


@pytest.mark.parametrize("accepted", [2, 7])
def test_the_run_ahead_covers_the_round_trip(accepted: int) -> None:
    """What is decided meanwhile at the best conceivable speed, and a window."""
    aheads = []
    for overhead_us in (1_000.0, 50_000.0):
        played = Played(False)
        played.turns(100, always(accepted), overhead_us=overhead_us)
        aheads.append(played.pacing.plan.pace.run_ahead)
    assert aheads[0] < aheads[1]


def test_who_is_off_is_tried_again_after_so_many_verdicts_and_not_before() -> None:
    played = Played(False)
    played.turns(100, always(0))
    assert played.discipline is Discipline.OFF
    waited = 0
    while played.discipline is Discipline.OFF:
        played.turn(0)
        waited += 1
    assert str(played.pacing.plan) == "stream: trying"
    assert 1 / EXPLORED_SHARE - 100 <= waited <= 1 / EXPLORED_SHARE + TRIAL_VERDICTS
    for _ in range(TRIAL_VERDICTS):
        played.turn(MOST_WINDOW)
    played.turns(100, always(MOST_WINDOW))
    assert played.pacing.plan.due > 0


def test_a_verifier_that_cannot_wait_is_sent_a_stream_and_shares_no_cores() -> None:
    apart, beside = Played(False, waits=False), Played(True, waits=False)
    apart.turns(50, always(MOST_WINDOW))
    beside.turns(50, always(MOST_WINDOW))
    assert (apart.discipline, apart.pacing.plan.due) == (Discipline.STREAM, 0)
    assert beside.discipline is Discipline.OFF


# ----------------------------------------------------------------------------------------------------------------------
# On the verifier's cores: in turns.


def test_turns_are_as_long_as_pays() -> None:
    short, long = Played(True), Played(True)
    short.turns(100, lambda at: at % 2, draft_us=500)
    long.turns(100, always(MOST_WINDOW), draft_us=500)
    assert short.discipline is long.discipline is Discipline.LOCKSTEP
    assert short.pacing.plan.due < long.pacing.plan.due


def test_turns_that_would_not_pay_are_not_asked_for_but_tried_at_a_price_that_is_known() -> None:
    """A token takes as long as a forward. The verifier waits 20 ms in a try: 0.5 % of the time is 4 s."""
    played = Played(True)
    played.turns(20, always(1), draft_us=10_000)
    assert played.discipline is Discipline.OFF

    def tried_after() -> int:
        verdicts = 0
        while played.discipline is Discipline.OFF:
            played.turn(0, at=step(lost_us=0.0))
            verdicts += 1
        while played.pacing.plan.due:
            played.turn(0, draft_us=10_000, at=step(lost_us=20_000.0))
        return verdicts

    tried_after()
    assert tried_after() * PLAIN_US >= 0.95 * 20_000.0 / 0.005, "the try itself is counted"


def test_a_ledger_that_cannot_bear_a_turn_stops_its_session_alone() -> None:
    learnt = LearntDrafter()
    rich, poor = Played(True, learnt), Played(True, learnt)
    rich.turns(20, always(4))
    poor.turns(20, always(4), at=step(spare_us=100.0))
    assert rich.discipline is Discipline.LOCKSTEP
    assert str(poor.pacing.plan) == "off: no turn that its ledger could bear"


def test_all_sessions_of_a_batch_draft_the_same_window() -> None:
    learnt = LearntDrafter()
    batch = [Played(True, learnt) for _ in range(4)]
    for at in range(40):
        for number, played in enumerate(batch):
            played.turn((at + number) % 5, at=step(sessions=4))
    for _ in range(4):  # each plans once in four verdicts
        for played in batch:
            played.pacing.verdict(0, step(sessions=4))
    assert {played.pacing.plan.due for played in batch} == {learnt.window}
    assert learnt.window > 0


def test_turns_that_are_asked_for_and_never_tested_end() -> None:
    played = Played(True)
    played.turns(20, always(MOST_WINDOW))
    assert played.pacing.plan.due > 0
    for _ in range(ENOUGH + 4):
        played.pacing.verdict(0, step())
    assert played.discipline is Discipline.OFF


# ----------------------------------------------------------------------------------------------------------------------
# What is learnt.


def test_a_sessions_first_chunk_counts_where_nothing_is_known() -> None:
    """The drafter has read the prompt for it."""
    played = Played(False)
    played.turn(2, draft_us=50_000)
    assert played.learnt.draft_us == 50_000
    played.turn(2, draft_us=700)
    assert played.learnt.draft_us == 700
    other = Played(False, played.learnt)
    other.turn(2, draft_us=50_000)
    assert played.learnt.draft_us == 700


def test_what_was_drafted_beside_a_forward_tells_between_what_and_what_a_token_takes() -> None:
    """Up to three times as long as apart: of 9 ms that are all beside one, 3 to 9."""
    learnt = LearntDrafter()
    learnt.drafted(1, 4000.0, 0.0)
    for took_us, known_us in ((9000.0, 4000.0), (15_000.0, 5000.0), (2500.0, 2500.0)):
        for _ in range(60):
            learnt.drafted(1, took_us, took_us)
        assert learnt.draft_us == pytest.approx(known_us, rel=0.01)


def test_a_nearer_line_is_believed_at_once_and_a_farther_one_by_and_by() -> None:
    learnt = LearntDrafter()
    learnt.answered(80_000.0)
    learnt.answered(5_000.0)
    assert learnt.overhead_us == 5_000.0
    learnt.answered(12_000.0)
    assert learnt.overhead_us is not None
    assert 5_000.0 < learnt.overhead_us < 12_000.0


def test_the_next_session_of_a_scope_begins_with_what_was_learnt_and_nobody_elses_does() -> None:
    known = LearntDrafters(most=2)
    first = known.of(b"a", "d")
    assert known.of(b"a", "d") is first
    assert known.of(b"b", "d") is not first
    assert known.of(b"", "d") is not known.of(b"", "d"), "it has no scope"
    for name in ("e", "f"):
        known.of(b"a", name)
    assert known.of(b"a", "d") is not first, "the least recently used is forgotten"


def test_a_session_begins_as_those_before_it_draft() -> None:
    turns, streams, given_up = LearntDrafter(), LearntDrafter(), LearntDrafter()
    Played(True, turns).turns(50, always(MOST_WINDOW))
    Played(False, streams).turns(50, always(MOST_WINDOW))
    Played(False, given_up).turns(100, always(0))
    assert Played(True, turns).pacing.plan.due == turns.window > PROBE_WINDOW
    assert Played(False, streams).discipline is Discipline.STREAM
    assert Played(False, given_up).discipline is Discipline.OFF


# ----------------------------------------------------------------------------------------------------------------------
# What is told.


def test_a_pace_is_told_once_and_as_the_rule_allows_it() -> None:
    played = Played(False, weighed=True)
    first = played.pacing.take_pace()
    assert first is not None
    assert played.pacing.take_pace() is None
    played.turns(100, always(MOST_WINDOW))
    later = played.pacing.take_pace()
    assert later is not None
    assert (later.source, later.pace.branches) == (1, 1)
    assert later.pace.chunk <= MOST_WINDOW
    assert later.reason == str(played.pacing.plan)


@pytest.mark.parametrize("plan", ["off", "lockstep:4", "stream:2,8,4"])
def test_a_fixed_plan_stays(plan: str) -> None:
    pacing = DrafterPacing(AssignedDrafter(1, plan=plan), LearntDrafter())
    before = pacing.plan
    for _ in range(3 * ENOUGH):
        pacing.verdict(0, step())
    assert pacing.plan is before
