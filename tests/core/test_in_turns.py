"""A drafter and a verifier on the same cores: what a draft takes by itself, and what follows from it."""

from __future__ import annotations

import pytest

from specwire.core.messages import Discipline, Outcome, Proposal, Verdict
from specwire.core.policy.controller import Controller
from specwire.core.policy.estimates import Estimates, Forward, ForwardTimes, LastDraft, TimedChunk
from specwire.core.policy.tunables import (
    ENOUGH,
    PROBE_WINDOW,
)

QUIET = {1: 10_000.0, 4: 10_000.0, 16: 10_000.0}

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
    assert last.verdict(Forward(10_000.0, 10_000.0)) == 500.0
    last.drafted(TimedChunk(ended_us, ended_us - began_us, 500.0))
    assert (last.verdict(Forward(25_000.0, 11_000.0)), last.apart) == (500.0, apart)
    # It is told once; a later verdict may still be an answer to it.
    assert (last.verdict(Forward(35_000.0, 10_000.0)), last.apart) == (None, apart)


def test_where_times_are_not_told_a_draft_counts_as_apart_and_a_session_s_first_does_not() -> None:
    last = LastDraft()
    last.verdict(Forward(10_000.0, 10_000.0))
    last.drafted(TimedChunk(14_000.0, 4_000.0, 500.0))
    assert (last.verdict(Forward(24_000.0, 10_000.0)), last.apart) == (500.0, False)
    last.drafted(TimedChunk(28_000.0, 4_000.0, 500.0))
    assert (last.verdict(None), last.apart) == (500.0, True)
    last.drafted(TimedChunk(None, 4_000.0, None))
    assert (last.verdict(Forward(48_000.0, 10_000.0)), last.apart) == (None, True)


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
        forward = Forward(self.now_us, 10_000.0, self.sessions, plain_us, drafts_us)
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


def test_a_drafter_on_the_cores_of_a_verifier_that_waits_for_nobody_is_off() -> None:
    """As beside vLLM's server: it streams from cores or a host of its own only."""
    subject = Controller(ForwardTimes(QUIET), shared_host=True, waits=False)
    turns = Turns(subject)
    assert subject.plan().discipline is Discipline.OFF
    turns.plain().apart(200.0).apart(200.0)
    assert subject.plan().discipline is Discipline.OFF
    assert Controller(ForwardTimes(QUIET), shared_host=False, waits=False).plan().discipline is Discipline.STREAM
