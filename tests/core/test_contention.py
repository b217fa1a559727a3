"""Whether a drafter and a verifier on one host disturb each other, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specwire.core.messages import Discipline, Outcome, Plan, Proposal, Verdict
from specwire.core.policy.controller import Controller
from specwire.core.policy.estimates import Contention, Estimates, Forward, ForwardTimes
from specwire.core.policy.shared_host import LastDraft, TimedChunk
from specwire.core.policy.tunables import (
    ENOUGH,
    EXPLORED_SHARE,
    PROBE_EVERY,
    PROBE_WINDOW,
    TRIAL_VERDICTS,
)

QUIET = {1: 10_000.0, 4: 10_000.0, 16: 10_000.0}
# Verdicts, many times those between two tries.
LONG = 1024
# Forwards of one kind after which nothing is known of the other.
STALE_AFTER = round(TRIAL_VERDICTS / EXPLORED_SHARE)


class Watched:
    """Forwards of 10 ms one after the other, with a drafter that is at work meanwhile or not."""

    def __init__(self) -> None:
        self.contention = Contention(ForwardTimes(QUIET))
        self.now_us = 0.0

    def forwards(self, count: int, took_us: float, share: float, rows: int = 1) -> Watched:
        """`share`: of each forward the drafter is at work, in two chunks."""
        for _ in range(count):
            began_us = self.now_us
            self.now_us += took_us
            self.contention.forward(Forward(rows, self.now_us, took_us))
            for part in (1, 2):
                self.contention.drafted(began_us + part * share * took_us / 2, share * took_us / 2)
        self.contention.drafted(self.now_us + 10.0, 1.0)  # whatever comes later settles what was before
        return self


def test_nothing_is_said_before_both_kinds_were_seen() -> None:
    watched = Watched().forwards(50, 10_000.0, 0.0)
    assert watched.contention.slowdown is None
    assert watched.contention.apart() is not None
    watched.forwards(ENOUGH - 1, 15_000.0, 0.9)
    assert watched.contention.slowdown is None
    watched.forwards(1, 15_000.0, 0.9)
    assert watched.contention.slowdown == pytest.approx(1.5)


def test_what_is_neither_together_nor_apart_counts_for_neither() -> None:
    watched = Watched().forwards(20, 10_000.0, 0.05).forwards(20, 14_000.0, 0.8).forwards(50, 99_000.0, 0.3)
    assert watched.contention.slowdown == pytest.approx(1.4)


def test_both_are_multiples_of_the_quiet_machine_s_times_at_their_width() -> None:
    contention = Watched().forwards(20, 10_000.0, 0.0, rows=2).forwards(20, 12_000.0, 1.0, rows=9).contention
    together, apart = contention.together(), contention.apart()
    assert together is not None
    assert apart is not None
    assert [apart.at(rows) for rows in (1, 16)] == pytest.approx([10_000.0, 10_000.0])
    assert [together.at(rows) for rows in (1, 16)] == pytest.approx([12_000.0, 12_000.0])


def test_a_drafter_never_helps() -> None:
    assert Watched().forwards(20, 10_000.0, 0.0).forwards(20, 9_000.0, 1.0).contention.slowdown == 1.0


def test_a_chunk_that_spans_several_forwards_counts_for_each() -> None:
    watched = Watched().forwards(20, 10_000.0, 0.0)
    for _ in range(10):
        began_us = watched.now_us
        for _ in range(3):
            watched.now_us += 20_000.0
            watched.contention.forward(Forward(1, watched.now_us, 20_000.0))
        watched.contention.drafted(watched.now_us, watched.now_us - began_us)
    watched.contention.drafted(watched.now_us + 10.0, 1.0)
    assert watched.contention.slowdown == pytest.approx(2.0)


def test_what_was_seen_long_ago_says_nothing() -> None:
    watched = Watched().forwards(20, 10_000.0, 0.0).forwards(STALE_AFTER - 1, 15_000.0, 1.0)
    assert watched.contention.slowdown is not None
    watched.forwards(1, 15_000.0, 1.0)
    assert watched.contention.slowdown is None
    assert watched.forwards(1, 10_000.0, 0.0).contention.slowdown == pytest.approx(1.5, rel=0.02)


def test_wide_forwards_and_such_without_time_are_not_looked_at() -> None:
    watched = Watched().forwards(20, 10_000.0, 0.0, rows=400)
    watched.contention.forward(Forward(1, 5.0, 0.0))
    assert not watched.contention._pending


# Which drafts the verifier was idle for


@pytest.mark.parametrize(
    ("began_us", "ended_us", "apart"),
    [
        (10_000.0, 14_000.0, True),
        (9_700.0, 13_700.0, True),  # messages are not equally fast
        (6_000.0, 14_000.0, False),  # it began in the middle of the forward before
        (12_000.0, 20_000.0, False),  # the verifier did not wait for its end
        (2_000.0, 30_000.0, False),
    ],
)
def test_a_draft_counts_as_apart_if_hardly_any_of_it_was_beside_a_forward(
    began_us: float, ended_us: float, apart: bool
) -> None:
    last = LastDraft()
    last.drafted(TimedChunk(2_000.0, 1_000.0, 500.0))
    assert last.verdict(Forward(1, 10_000.0, 10_000.0)) == 500.0
    last.drafted(TimedChunk(ended_us, ended_us - began_us, 500.0))
    assert (last.verdict(Forward(3, 25_000.0, 11_000.0)), last.apart) == (500.0, apart)
    # It is told once; a later verdict may still be an answer to it.
    assert (last.verdict(Forward(1, 35_000.0, 10_000.0)), last.apart) == (None, apart)


def test_where_times_are_not_told_a_draft_counts_as_apart_and_a_session_s_first_does_not() -> None:
    last = LastDraft()
    last.verdict(Forward(1, 10_000.0, 10_000.0))
    last.drafted(TimedChunk(14_000.0, 4_000.0, 500.0))
    assert (last.verdict(Forward(1, 24_000.0, 10_000.0)), last.apart) == (500.0, False)
    last.drafted(TimedChunk(28_000.0, 4_000.0, 500.0))
    assert (last.verdict(None), last.apart) == (500.0, True)
    last.drafted(TimedChunk(None, 4_000.0, None))
    assert (last.verdict(Forward(1, 48_000.0, 10_000.0)), last.apart) == (None, True)


def test_beside_forwards_a_draft_takes_longer_but_not_any_time() -> None:
    known = Estimates()
    known.drafted(3_000.0, 0.2, apart=False)
    known.drafted(4_000.0, 0.2, apart=False)
    assert known.draft_us == pytest.approx(3_200.0)
    known.drafted(1_000.0, 0.2, apart=True)
    assert known.draft_us == 1_000.0, "the first draft apart replaces what was measured beside forwards"
    # One hiccup moves it little, a drafter that has become slow or fast moves it again and again.
    for beside_us, draft_us in ((2_900.0, 1_000.0), (6_000.0, 1_200.0), (6_000.0, 1_360.0), (860.0, 1_260.0)):
        known.drafted(beside_us, 0.2, apart=False)
        assert known.draft_us == pytest.approx(draft_us)
    assert known.faded().drafted_apart


# What the controller makes of it


class Host:
    """A controller on a shared host that runs sessions: the drafter takes `draft_us` a token, right in nine of ten.

    told: whether it is told the times. In turns they never overlap; side by side both take `slowdown` times as long.
    lost_us: what side by side takes besides, in no forward and in no drafting. waits: the verifier can take turns.
    """

    def __init__(
        self,
        slowdown: float,
        draft_us: float = 2_500.0,
        told: bool = True,
        lost_us: float = 0.0,
        waits: bool = True,
    ) -> None:
        self.controller = Controller(ForwardTimes(QUIET), shared_host=True, waits=waits)
        self.slowdown, self.draft_us, self.told, self.lost_us = slowdown, draft_us, told, lost_us
        self.now_us = 0.0
        self.length = 1
        self.plans: list[Plan] = []

    def verdicts(self, count: int) -> list[Plan]:
        """The plan in force at each."""
        for number in range(count):
            plan = self.controller.plan()
            self.plans.append(plan)
            beside = plan.discipline is Discipline.STREAM
            stretch = self.slowdown if beside else 1.0
            tokens = 4 if beside else plan.pace.run_ahead
            accepted = tokens if number % 5 else max(0, tokens - 2)
            self._draft(tokens, stretch, beside)
            self._forward(tokens, accepted, stretch)
            self.now_us += self.lost_us if beside else 0.0
        return self.plans[-count:]

    def _draft(self, tokens: int, stretch: float, beside: bool) -> None:
        """Before the forward, or during it."""
        took_us = tokens * self.draft_us * stretch
        if not tokens:
            return
        arrived_us = self.now_us + took_us
        if not beside:
            self.now_us = arrived_us
        guess = tuple(2 for _ in range(tokens))
        proposal = Proposal(1, len(self.plans), self.length, 0, guess, 7)
        self.controller.observe_proposal(proposal, round(took_us), arrived_us if self.told else None)

    def _forward(self, tested: int, accepted: int, stretch: float) -> None:
        took_us = stretch * 10_000.0
        self.now_us += took_us
        forward = Forward(tested + 1, self.now_us, took_us) if self.told else None
        decided = (*[2] * accepted, 3)
        outcomes = (*[Outcome.ACCEPTED] * accepted, Outcome.RECOVERED if accepted < tested else Outcome.BONUS)
        self.controller.observe_verdict(Verdict(self.length, decided, outcomes, tested), forward)
        self.length += len(decided)


class Turns:
    """A controller beside a drafter that is right, and what happens there on one clock; forwards take 10 ms.

    overhead_us: of an answer, besides its drafting.
    """

    def __init__(self, subject: Controller | None = None, sessions: int = 1, overhead_us: float = 0.0) -> None:
        self.subject = subject or Controller(ForwardTimes(QUIET), shared_host=True)
        self.sessions, self.overhead_us = sessions, overhead_us
        self.now_us, self.length, self.chunks = 0.0, 1, 0

    @property
    def reason(self) -> str:
        return self.subject.plan().reason

    def plain(self, count: int = 1) -> Turns:
        """Verdicts for which nothing was drafted."""
        for _ in range(count):
            self._forward(0, 0.0)
        return self

    def beside(self, draft_us: float, tested: int = PROBE_WINDOW) -> Turns:
        """A chunk that began in the middle of the last forward, and its verdict."""
        return self._answer(self.now_us - 5_000.0, draft_us, tested)

    def apart(self, draft_us: float, tested: int = PROBE_WINDOW) -> Turns:
        """A chunk that began behind the last forward, and its verdict."""
        return self._answer(self.now_us, draft_us, tested)

    def late(self, draft_us: float) -> Turns:
        """A chunk that the verifier does not wait for: verdicts go on until it is there, and then it is too old."""
        ended_us = self.now_us + draft_us
        while self.now_us + 10_000.0 <= ended_us:
            self.plain()
        self._propose(ended_us, draft_us)
        self._forward(0, draft_us + self.overhead_us)
        return self

    def _answer(self, began_us: float, draft_us: float, tested: int) -> Turns:
        delay_us = began_us + draft_us + self.overhead_us - self.now_us
        self._propose(began_us + draft_us, draft_us)
        self.now_us += delay_us
        self._forward(tested, delay_us)
        return self

    def _propose(self, ended_us: float, draft_us: float) -> None:
        self.chunks += 1
        guess = (2,) * PROBE_WINDOW
        proposal = Proposal(1, self.chunks, self.length, 0, guess, 7)
        self.subject.observe_proposal(proposal, round(draft_us), ended_us)

    def _forward(self, tested: int, delay_us: float) -> None:
        self.now_us += 10_000.0
        outcomes = (*[Outcome.ACCEPTED] * tested, Outcome.BONUS)
        verdict = Verdict(self.length, (2,) * (tested + 1), outcomes, tested, delay_us=round(delay_us))
        plain_us, drafts_us = (10_000.0, 500.0) if self.sessions > 1 else (0.0, 0.0)
        forward = Forward(tested + 1, self.now_us, 10_000.0, self.sessions, plain_us, drafts_us)
        self.subject.observe_verdict(verdict, forward)
        self.length += tested + 1


@pytest.mark.parametrize("prompt", [1, 3, 30])
def test_it_measures_until_a_draft_was_apart_from_forwards(prompt: int) -> None:
    """A first chunk that took 20 ms beside a forward says little of a drafter that takes 1 ms a token by itself.

    prompt: verdicts while the drafter reads it.
    """
    turns = Turns(overhead_us=300.0).plain(prompt)
    assert turns.beside(20_000.0).reason == "measuring"
    plan = turns.subject.plan()
    assert (plan.discipline, plan.due) == (Discipline.LOCKSTEP, PROBE_WINDOW)
    assert turns.apart(2_000.0).reason.startswith("window")
    assert turns.subject._known.draft_us == 1_000.0
    assert turns.subject._known.overhead_us == 300.0, "what an answer took beside a forward is not known to be overhead"


def test_it_does_not_measure_for_ever() -> None:
    """A drafter that is never done before the verifier has gone on is too slow."""
    turns = Turns()
    assert turns.late(60_000.0).reason == "measuring"
    turns.late(60_000.0)
    assert turns.subject.plan().discipline is Discipline.OFF


def test_a_probe_does_not_end_with_an_answer_that_was_drafted_beside_a_forward() -> None:
    """It ends with one that was drafted apart, which a drafter that was heard so long ago is known by."""
    turns = Turns().plain().apart(40_000.0, tested=0).apart(40_000.0, tested=0)
    while turns.reason != "probe":
        assert turns.subject.plan().discipline is Discipline.OFF
        turns.plain()
    assert turns.beside(20_000.0).reason == "probe"
    turns.apart(2_000.0)
    assert turns.subject._known.draft_us == pytest.approx(1_000.0, rel=0.01)
    assert turns.subject.plan().discipline is not Discipline.OFF
    assert turns.reason != "probe"
    assert turns.subject._turns.probes.price_us == 15_000.0 + 2_000.0


def test_an_answer_without_a_new_chunk_is_as_apart_as_the_last_chunk_was() -> None:
    turns = Turns().plain()
    turns.beside(20_000.0)
    turns._forward(PROBE_WINDOW, 15_000.0)
    assert turns.reason == "measuring"
    assert turns.subject._known.overhead_us is None


@pytest.mark.parametrize("prompt", [1, 30])
@pytest.mark.parametrize("moves", [True, False])
def test_who_comes_before_the_drafter_was_measured_apart_measures_it(moves: bool, prompt: int) -> None:
    """A session behind another one that ended, or that moved to another verifier, has the whole first try."""
    before = Turns().plain().beside(20_000.0).subject
    heir = Turns(before.successor(ForwardTimes(QUIET) if moves else before._forward, shared_host=True))
    assert heir.reason == "measuring"
    assert heir.plain(prompt).beside(20_000.0).reason == "measuring"
    assert heir.apart(2_000.0).reason.startswith("window")


def test_a_probe_ends_with_a_session_that_was_alone() -> None:
    """The next one's drafter reads a prompt first, for which nobody is to wait."""
    turns = Turns().plain().apart(40_000.0, tested=0).apart(40_000.0, tested=0)
    while turns.reason != "probe":
        turns.plain()
    turns.plain()
    assert turns.reason == "probe"
    assert turns.subject.successor(turns.subject._forward, True).plan().discipline is Discipline.OFF


def test_who_has_heard_nothing_of_its_own_goes_by_what_others_have() -> None:
    before = Turns().late(60_000.0).late(60_000.0)
    assert before.subject.plan().discipline is Discipline.OFF
    heir = before.subject.successor(before.subject._forward, True)
    heir._known = Estimates()
    heir._turns.probes.left = 0.0
    assert heir.plan().discipline is Discipline.OFF


def test_a_session_whose_first_draft_was_slow_beside_a_forward_goes_by_what_others_have_seen_apart() -> None:
    subject = Turns().plain().beside(20_000.0).apart(2_000.0).subject
    heir = Turns(subject.successor(subject._forward, shared_host=True))
    heir.subject._known = Estimates()  # as that of one who began before the other had measured anything
    assert heir.reason.startswith("window")
    assert heir.plain().beside(20_000.0).reason.startswith("window")


def test_a_crowd_measures_together_and_no_newcomer_s_slow_chunk_stops_it() -> None:
    """All share one try, of four steps, not of four verdicts. A pass that reads a prompt is one slow draft of many."""
    first = Turns(sessions=8)
    crowd = [first, *(Turns(first.subject.successor(first.subject._forward, True), 8) for _ in range(7))]
    for _ in range(2):
        for each in crowd:
            each.beside(20_000.0)
    assert {each.reason for each in crowd} == {"measuring"}
    for each in crowd:
        each.apart(2_000.0)
    assert all(each.reason.startswith("window") for each in crowd)
    assert first.subject._turns.known.draft_us == pytest.approx(1_000.0)
    for each in crowd:
        each.beside(80_000.0)
    assert all(each.reason.startswith("window") for each in crowd)


def test_that_answers_were_not_tested_says_nothing_of_the_next_session_s() -> None:
    """Its verifier had no ledger left for that session; the next one has its own."""
    turns = Turns().plain().apart(2_000.0).apart(2_000.0)
    for _ in range(ENOUGH):
        turns.apart(2_000.0, tested=0)
    assert turns.subject.plan().discipline is Discipline.OFF
    assert turns.subject.successor(turns.subject._forward, True).plan().discipline is Discipline.LOCKSTEP


def disciplines(plans: list[Plan]) -> set[Discipline]:
    return {plan.discipline for plan in plans}


def side_by_side(plans: list[Plan]) -> float:
    """The share of verdicts."""
    return sum(plan.discipline is Discipline.STREAM for plan in plans) / len(plans)


def test_where_no_times_are_told_they_take_turns() -> None:
    assert disciplines(Host(1.0, told=False).verdicts(3 * LONG)) == {Discipline.LOCKSTEP}


def test_where_they_do_not_disturb_each_other_they_work_side_by_side() -> None:
    host = Host(1.0)
    assert disciplines(host.verdicts(PROBE_EVERY)) == {Discipline.LOCKSTEP}
    host.verdicts(2 * TRIAL_VERDICTS)
    assert disciplines(host.verdicts(200)) == {Discipline.STREAM}
    assert host.plans[-1].due == 0
    assert "contention 1.00" in host.plans[-1].reason


def test_in_a_batch_they_take_turns_and_begin_again_behind_it() -> None:
    """What a session alone gains side by side says nothing of many, for all of whom the drafter would draft."""
    host = Host(1.0)
    host.verdicts(PROBE_EVERY + 2 * TRIAL_VERDICTS)
    assert host.plans[-1].discipline is Discipline.STREAM
    host.told = False  # of forwards of several sessions no times are told
    assert disciplines(host.verdicts(200)[1:]) == {Discipline.LOCKSTEP}
    host.told = True
    assert host.verdicts(20)[-1].discipline is Discipline.STREAM


@pytest.mark.parametrize("slowdown", [2.5, 4.0])
def test_where_they_do_they_take_turns_and_try_again_now_and_then(slowdown: float) -> None:
    host = Host(slowdown)
    host.verdicts(PROBE_EVERY + 2 * TRIAL_VERDICTS)
    later = host.verdicts(8 * LONG)
    tried = [plan for plan in later if plan.discipline is Discipline.STREAM]
    assert {plan.reason for plan in tried} == {"trying side by side"}
    assert 0 < len(tried) <= 0.02 * len(later)


def test_a_try_ends_as_soon_as_it_is_known_what_both_take_from_each_other() -> None:
    host = Host(4.0)
    host.verdicts(PROBE_EVERY + 2 * TRIAL_VERDICTS)
    tried = [plan for plan in host.plans if plan.discipline is Discipline.STREAM]
    assert ENOUGH <= len(tried) < TRIAL_VERDICTS


def test_what_side_by_side_really_brings_goes_before_what_is_expected_of_it() -> None:
    host = Host(1.0, lost_us=15_000.0)
    host.verdicts(PROBE_EVERY + 4 * TRIAL_VERDICTS)
    assert 0 < side_by_side(host.verdicts(4 * LONG)) <= 0.04


def test_what_changes_is_noticed() -> None:
    host = Host(2.5)
    host.verdicts(PROBE_EVERY + 2 * TRIAL_VERDICTS)
    host.slowdown = 1.0
    assert host.verdicts(4 * LONG)[-1].discipline is Discipline.STREAM
    host.slowdown = 2.5
    host.verdicts(STALE_AFTER)
    assert side_by_side(host.verdicts(LONG)) <= 0.02


def test_it_is_not_tried_where_it_could_not_pay() -> None:
    """A drafter that takes no time is hidden behind nothing."""
    assert disciplines(Host(1.0, draft_us=10.0).verdicts(2 * LONG)) == {Discipline.LOCKSTEP}


def test_a_verifier_that_waits_for_nobody_takes_no_turns() -> None:
    """As vLLM's server: a drafter beside it works side by side with it, or is off."""
    good = Host(1.0, waits=False)
    good.verdicts(PROBE_EVERY + 4 * TRIAL_VERDICTS)
    assert side_by_side(good.verdicts(LONG)) >= 0.95
    for bad in (Host(4.0, waits=False), Host(1.0, lost_us=80_000.0, waits=False)):
        bad.verdicts(PROBE_EVERY + 4 * TRIAL_VERDICTS)
        later = bad.verdicts(8 * LONG)
        assert disciplines(later) == {Discipline.STREAM, Discipline.OFF}  # it is tried now and then
        assert side_by_side(later) <= 0.05


def test_in_a_batch_of_a_verifier_that_waits_for_nobody_it_is_off() -> None:
    host = Host(1.0, waits=False)
    host.verdicts(PROBE_EVERY + 4 * TRIAL_VERDICTS)
    host.told = False
    assert side_by_side(host.verdicts(4 * LONG)) <= 0.05


@pytest.mark.parametrize("move", [lambda host: ForwardTimes(QUIET), lambda host: host.controller._forward])
def test_what_was_measured_is_kept_for_the_next_session_beside_the_same_verifier(
    move: Callable[[Host], ForwardTimes],
) -> None:
    host = Host(1.0)
    host.verdicts(PROBE_EVERY + 4 * TRIAL_VERDICTS)
    forward = move(host)
    same = forward is host.controller._forward
    host.controller = host.controller.successor(forward, shared_host=True)
    assert disciplines(host.verdicts(8)) == {Discipline.STREAM if same else Discipline.LOCKSTEP}
