"""The controller: what it plans from what it is told.

Its bounds are written out here as numbers: a bound that is changed fails a test.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from specwire.core.messages import Discipline, Outcome, Pace, Plan, Proposal, SourceKind, Verdict
from specwire.core.policy.controller import Controller, Fixed, InTurns, Tries, parse_plan
from specwire.core.policy.estimates import Estimates, Forward, ForwardTimes
from specwire.core.policy.tunables import AWAITED_VERDICTS, PROBE_EVERY

FLAT = {1: 10_000.0, 4: 10_500.0, 8: 11_000.0, 17: 12_000.0}


def controller(shared: bool = True, forward: dict[int, float] | None = None) -> Controller:
    return Controller(ForwardTimes(forward or FLAT), shared)


def verdict(tested: int, accepted: int = 0, delay_us: int = 0, position: int = 0) -> Verdict:
    """Of `tested` draft tokens the first `accepted` were right, then comes one more decided token."""
    tokens = (*range(accepted), 999)
    outcomes = (*[Outcome.ACCEPTED] * accepted, Outcome.RECOVERED if accepted < tested else Outcome.BONUS)
    return Verdict(position, tokens, outcomes, tested, delay_us=delay_us)


def learn(
    subject: Controller, draft_us: int, accepted: int, tested: int = 8, delay_us: int = 0, times: int = 200
) -> None:
    for chain in range(times):
        observe(subject, chain, tested, accepted, draft_us * tested, delay_us)


def observe(
    subject: Controller | Fixed,
    chain: int,
    tested: int,
    accepted: int,
    drafting_us: int,
    delay_us: int,
    expected: float = 0.0,
) -> None:
    """A chain of `tested` tokens of which the first `accepted` are right, then one more decided token."""
    base = 100 * chain
    subject.observe_proposal(Proposal(1, chain, base, 0, tuple(range(tested)), 7, expected), drafting_us)
    subject.observe_verdict(verdict(tested, accepted, delay_us, base))


def consistent(plan: Plan) -> bool:
    """Nothing is drafted when off, only a stream comes unasked, and a reason is given."""
    off = plan.discipline is Discipline.OFF
    asked = plan.due > 0 or plan.discipline is Discipline.STREAM
    return off == (plan.pace.run_ahead == 0) == (not asked) and plan.pace.chunk >= 1 and bool(plan.reason)


def test_it_starts_by_measuring() -> None:
    for shared, discipline in ((True, Discipline.LOCKSTEP), (False, Discipline.STREAM)):
        plan = controller(shared).plan()
        assert (plan.discipline, plan.reason) == (discipline, "measuring")
        assert consistent(plan)


def test_shared_cores_take_turns_in_whole_chunks() -> None:
    subject = controller()
    learn(subject, draft_us=500, accepted=6)
    plan = subject.plan()
    assert plan.discipline is Discipline.LOCKSTEP
    assert plan.pace.chunk == plan.pace.run_ahead == plan.due > 2
    assert consistent(plan)


def test_a_better_drafter_gets_a_longer_window() -> None:
    windows = []
    for accepted in (1, 3, 6, 8):
        subject = controller()
        learn(subject, draft_us=500, accepted=accepted)
        windows.append(subject.plan().due)
    assert windows == sorted(windows)
    assert windows[0] < windows[-1] == 16


def remote(accepted: int, delay_us: int, draft_us: int = 500) -> Plan:
    """The plan for a drafter on hardware of its own that has answered after `delay_us` for a while."""
    subject = controller(shared=False)
    for chain in range(100):
        observe(subject, chain, 8, accepted, 8 * draft_us, delay_us + 8 * draft_us)
    return subject.plan()


def test_near_and_fast_drafters_are_waited_for() -> None:
    plan = remote(accepted=6, delay_us=100)
    assert plan.discipline is Discipline.STREAM
    assert plan.due > 2
    assert plan.pace.chunk <= plan.due


def test_far_drafters_stream_and_nobody_waits() -> None:
    near, far = remote(accepted=2, delay_us=25_000), remote(accepted=2, delay_us=60_000)
    assert (near.discipline, near.due) == (far.discipline, far.due) == (Discipline.STREAM, 0)
    assert far.pace.run_ahead >= near.pace.run_ahead > near.pace.chunk


def test_nobody_drafts_further_than_guesses_are_right_in_a_row() -> None:
    """Beyond that it is of no use, and who is at rest begins a new chain at once. One that is quick needs no rest."""
    poor, good = remote(accepted=2, delay_us=25_000), remote(accepted=7, delay_us=25_000)
    quick = remote(accepted=2, delay_us=25_000, draft_us=300)
    assert poor.pace.run_ahead < good.pace.run_ahead
    assert poor.pace.run_ahead < 16 < quick.pace.run_ahead


def test_far_and_poor_drafters_are_off() -> None:
    assert remote(accepted=0, delay_us=200_000).discipline is Discipline.OFF


def test_a_far_drafter_whose_line_got_shorter_is_used_from_the_first_probe_on() -> None:
    subject = controller(shared=False)
    for chain in range(40):
        observe(subject, chain, 8, 4, 4_000, 2_004_000)
    assert subject.plan().discipline is Discipline.OFF
    observe(subject, 40, 2, 2, 1_000, 6_000)
    assert subject.plan().discipline is Discipline.STREAM


def test_a_far_drafter_that_connects_again_is_measured_again() -> None:
    subject = controller(shared=False)
    for chain in range(40):
        observe(subject, chain, 8, 4, 4_000, 2_004_000)
    assert subject.plan().discipline is Discipline.OFF
    subject.drafter_changed()
    assert subject.plan().discipline is Discipline.STREAM


def settled(subject: Controller) -> Plan:
    """The plan once a probe, if there is one, has had its answer."""
    if subject.plan().reason == "probe":
        subject.observe_verdict(verdict(1))
    return subject.plan()


def test_off_without_gain_for_a_slow_or_a_poor_drafter() -> None:
    for draft_us, accepted in ((20_000, 4), (5_000, 0)):
        subject = controller()
        learn(subject, draft_us, accepted)
        plan = settled(subject)
        assert (plan.discipline, plan.due) == (Discipline.OFF, 0)
        assert consistent(plan)


def test_in_a_batch_it_takes_turns_by_what_draft_tokens_add_to_the_step_of_all() -> None:
    """Alone a window is nearly free; for eight sessions it costs as much as it brings.

    A stream from hardware of its own costs the others only the rows that the verifier itself gives it, and goes on.
    """
    cheap, dear = Forward(0.0, 20_000.0, 8, 20_000.0, 200.0), Forward(0.0, 20_000.0, 8, 20_000.0, 24_000.0)
    for shared in (True, False):
        subject = controller(shared)
        learn(subject, draft_us=500, accepted=3)
        assert subject.plan().discipline is not Discipline.OFF
        subject.observe_verdict(verdict(0), dear)
        stopped = subject.plan().reason in ("probe", "no gain expected")
        assert stopped == shared
        subject.observe_verdict(verdict(0), cheap)
        assert subject.plan().discipline is not Discipline.OFF


def test_a_batch_on_one_host_needs_a_gain_of_five_percent_to_take_turns() -> None:
    """A window of 1 is always right: 2 tokens for 10,500 + drafts_us, where plain decoding has 1 for 10,000."""
    for drafts_us, discipline in ((9_100.0, Discipline.OFF), (8_000.0, Discipline.LOCKSTEP)):
        subject = controller()
        learn(subject, draft_us=500, accepted=1, tested=1)
        learn(subject, draft_us=500, accepted=1)
        subject.observe_verdict(verdict(0), Forward(0.0, 10_000.0, 8, 10_000.0, drafts_us))
        assert settled(subject).discipline is discipline


def batch(drafts_us: float, ended_us: float = 0.0, sessions: int = 2) -> Forward:
    """A step of so many sessions, to which a draft token for each adds so much."""
    return Forward(ended_us, 10_000.0, sessions, 10_000.0, drafts_us)


def two_of_a_batch(accepted: int) -> tuple[Controller, Controller]:
    """Sessions at once; the first has learnt of many windows of one token, the second of one that was wrong."""
    forward = ForwardTimes(FLAT)
    first = Controller(forward, True)
    learn(first, draft_us=500, accepted=0, tested=1, times=1)
    second = first.successor(forward, True)
    learn(first, draft_us=500, accepted=accepted, tested=1)
    return first, second


def test_sessions_of_a_batch_decide_together() -> None:
    """What one has seen makes all draft or none, and at once, however little the others have seen."""
    for accepted, discipline in ((1, Discipline.LOCKSTEP), (0, Discipline.OFF)):
        first, second = two_of_a_batch(accepted)
        for position in range(40):
            for each in (first, second):
                each.observe_verdict(verdict(0, position=position), batch(7_000.0))
        first.plan()
        assert second.time_to_plan
        assert settled(first).discipline is settled(second).discipline is discipline


def test_a_batch_that_drafts_goes_on_while_it_gains() -> None:
    """Nearly 2 tokens for 10,500 + 8,900 are a gain of 2 %, which is not enough to begin."""
    first, second = two_of_a_batch(1)
    drafting = []
    for drafts_us in (8_900.0, 8_000.0, 8_900.0, 9_800.0):
        for each in (first, second):
            each.observe_verdict(verdict(0), batch(drafts_us))
        drafting.append([each.plan().reason.startswith("window") for each in (first, second)])
    assert drafting == [[False, False], [True, True], [True, True], [False, False]]


def test_all_of_a_batch_draft_the_same_window() -> None:
    """Who waits for the longest may as well draft as far. Alone one drafts further than the other."""
    forward = ForwardTimes(FLAT)
    first = Controller(forward, True)
    learn(first, draft_us=500, accepted=2, times=1)
    second = first.successor(forward, True)
    learn(first, draft_us=500, accepted=6)
    learn(second, draft_us=500, accepted=1)
    assert first.plan().due > second.plan().due > 0
    for each in (first, second):
        each.observe_verdict(verdict(0), batch(500.0))
    assert first.plan().due == second.plan().due > 0
    learn(second, draft_us=500, accepted=8)
    second.observe_verdict(verdict(0), batch(500.0))
    before, after = first.plan().due, second.plan().due
    assert before == after == first.plan().due


def test_a_batch_keeps_its_window_while_another_is_hardly_better() -> None:
    """While windows change, some of the batch wait for others. What its rows cost wobbles by 20 us."""
    subject, windows = controller(), []
    for chain in range(200):
        observe(subject, chain, 8, 5 * chain % 9, 8 * 500, 0)
    for drafts_us in range(400, 1_600, 20):
        for wobble_us in (-10, 10, -10, 10):
            subject.observe_verdict(verdict(0), batch(drafts_us + wobble_us))
            windows.append(subject.plan().due)
    assert sum(before != after for before, after in pairwise(windows)) == len(set(windows)) - 1 > 0


def test_the_first_guesses_of_a_crowd_count_as_those_of_a_session_alone() -> None:
    """A token is worth its time if 45 % are right, and 70 % are expected. The third step without any turns all off."""

    def drafting(sessions: int) -> list[bool]:
        forward = ForwardTimes(FLAT)
        crowd = [Controller(forward, True)]
        while len(crowd) < sessions:
            crowd.append(crowd[-1].successor(forward, True))
        found = []
        for step, tested in enumerate((0, 0, 1, 1, 1)):
            for each in crowd:
                each.observe_proposal(Proposal(1, step, 100 * step, 0, (0,), 7, 0.0), 500)
                each.observe_verdict(verdict(tested, position=100 * step), batch(4_000.0, 1.0 + step, 8))
            (drafts,) = {each.plan().reason.startswith("window") for each in crowd}
            found.append(drafts)
        return found

    assert drafting(1) == drafting(4) == [True, True, True, True, False]


def test_before_a_verdict_of_its_own_a_session_follows_and_decides_nothing() -> None:
    """It inherits the step of the one before it, and nobody may share it any more."""
    first, second = two_of_a_batch(1)
    for each in (first, second):
        each.observe_verdict(verdict(0), batch(8_000.0))
    window = first.plan().due
    assert window == second.plan().due > 0
    learn(first, draft_us=500, accepted=0, tested=1)
    assert not first.time_to_plan
    heir = first.successor(first._forward, True)
    assert heir.plan().due == window
    assert not first.time_to_plan
    heir.observe_verdict(verdict(0), batch(8_000.0))
    assert not heir.plan().reason.startswith("window")
    assert first.time_to_plan


def test_a_session_that_moves_decides_with_those_that_are_there() -> None:
    first, second = two_of_a_batch(1)
    for each in (first, second):
        each.observe_verdict(verdict(0), batch(8_000.0))
    window = first.plan().due
    mover = controller()
    learn(mover, draft_us=5_000, accepted=0, tested=1)
    assert settled(mover).discipline is mover.successor(first._forward, True).plan().discipline is Discipline.OFF
    moved = mover.successor(first._forward, True, second)
    assert moved.plan().due == window > 0
    moved.observe_verdict(verdict(0), batch(8_000.0))
    assert moved.plan().due == window
    learn(moved, draft_us=500, accepted=0, tested=1)
    moved.observe_verdict(verdict(0), batch(8_000.0))
    assert [each.plan().reason.startswith("window") for each in (moved, first, second)] == [False] * 3


def test_a_batch_is_probed_by_all_of_its_sessions_at_once() -> None:
    """All wait for a probe, and it tells what drafting for all takes. An answer drafted apart ends it for all."""
    sessions = two_of_a_batch(0)
    probed: list[list[int]] = [[], []]
    for step in range(400):
        for number, each in enumerate(sessions):
            answered = step > 0 and step - 1 in probed[number]
            each.observe_verdict(verdict(0, delay_us=100 if answered else 0), batch(9_000.0))
        for number, each in enumerate(sessions):
            if (each.time_to_plan or step in (0, *probed[number])) and each.plan().reason == "probe":
                probed[number].append(step)
    assert probed[0] == probed[1]
    assert len(probed[0]) >= 3


def test_a_probe_among_strangers_is_as_long_as_alone() -> None:
    """They share its steps, and so it comes the less often, but they do not try with it."""
    tries = Tries()
    for _ in range(16 * PROBE_EVERY):
        tries.verdict(16)
    assert tries.begins(10_000.0, AWAITED_VERDICTS)
    for _ in range(AWAITED_VERDICTS):
        assert not tries.ended
        tries.verdict(16, together=1)
    assert tries.ended


def test_waits_for_others_fade_while_one_s_own_drafter_is_waited_for() -> None:
    """Nobody knows then whether the others are still there."""
    turns = InTurns(Estimates())
    for _ in range(50):
        turns.waited(4_000.0, heard=False)
    known_us = turns.others_us
    assert known_us == pytest.approx(4_000.0, rel=0.01)
    turns.decide(2)
    for _ in range(300):
        turns.waited(5_000.0, heard=False)
    assert turns.others_us < 0.01 * known_us
    turns.decide(0)
    for _ in range(50):
        turns.waited(4_000.0, heard=False)
    assert turns.others_us == pytest.approx(known_us, rel=0.01)


def test_where_others_of_a_batch_are_waited_for_drafting_costs_less() -> None:
    """2 of 5 are right: 1.4 tokens in 14,500 against 1 in 10,000, or in 14,000 where 4,000 are waited in any case."""
    for waited_us, discipline in ((0.0, Discipline.OFF), (4_000.0, Discipline.LOCKSTEP)):
        subject = controller()
        for chain in range(200):
            observe(subject, chain, tested=1, accepted=int(chain % 5 < 2), drafting_us=4_000, delay_us=0)
        for _ in range(40):
            subject.observe_verdict(verdict(0), Forward(0.0, 10_000.0, 8, 10_000.0, 500.0, waited_us))
        assert settled(subject).discipline is discipline


def test_a_batch_waits_for_as_many_tokens_of_a_drafter_elsewhere_as_its_rows_are_worth() -> None:
    """A stream goes on at any price of rows, but the dearer they are, the shorter the chunk that is waited for."""
    due = []
    for drafts_us in (500.0, 4_000.0, 16_000.0):
        subject = controller(shared=False)
        for chain in range(200):
            observe(subject, chain, 8, 5 * chain % 9, 8 * 200, 1_700)
        subject.observe_verdict(verdict(0), Forward(0.0, 20_000.0, 8, 20_000.0, drafts_us))
        plan = subject.plan()
        assert plan.discipline is not Discipline.OFF
        assert plan.pace.run_ahead > plan.due
        due.append(plan.due)
    assert due[0] > due[1] > due[2]


def test_off_is_probed_now_and_then() -> None:
    subject = controller()
    learn(subject, 20_000, 0)
    plans = []
    for _ in range(3 * 128):
        subject.observe_verdict(verdict(0))
        plans.append(subject.plan())
    probes = [index for index, plan in enumerate(plans) if plan.reason == "probe"]
    assert probes == [begun + verdict for begun in (0, 128, 256) for verdict in range(4)]
    assert all(plans[index].due == 2 and consistent(plans[index]) for index in probes)


def test_a_batch_is_probed_as_often_as_a_session_alone() -> None:
    """All eight wait for the probe of one, so each of them probes an eighth as often."""
    subject = controller()
    learn(subject, 20_000, 0)
    reasons = []
    for _ in range(3 * 8 * 128):
        subject.observe_verdict(verdict(0), Forward(0.0, 1e6, 8, 1e6, 500.0))
        reasons.append(subject.plan().reason)
    begun = [index for index, pair in enumerate(pairwise(reasons)) if pair == ("no gain expected", "probe")]
    assert begun[-1] - begun[-2] == 8 * 128


def test_what_a_slow_line_s_answers_cost_does_not_put_off_a_drafter_on_another_line() -> None:
    """Answers that were never tested put it off, and a probe that took 2 s would be paid back in 400 s."""
    forward = ForwardTimes(FLAT)
    subject = Controller(forward, True)
    learn(subject, draft_us=500, accepted=6)
    assert subject.plan().discipline is Discipline.LOCKSTEP
    for _ in range(2 * 128):
        subject.observe_verdict(verdict(0)._replace(delay_us=2_000_000))
        subject.plan()
    assert subject.plan().reason == "no gain expected"
    heir = subject.successor(forward, True)
    assert heir.plan().reason == "no gain expected"
    heir.drafter_changed()
    assert heir.plan().discipline is Discipline.LOCKSTEP


def test_a_probe_ends_with_its_answer() -> None:
    subject = controller()
    learn(subject, 20_000, 0)
    assert subject.plan().reason == "probe"
    subject.observe_verdict(verdict(0))
    assert subject.plan().reason == "probe"
    subject.observe_verdict(verdict(2))
    assert subject.time_to_plan
    assert subject.plan().discipline is Discipline.OFF


def test_what_is_off_is_planned_once_in_the_verdicts_of_a_try_and_at_once_behind_one() -> None:
    """A session's first verdicts, too, where the one before it left it off: all of a batch would plan at each."""
    subject = controller()
    learn(subject, 20_000, 0)
    settled(subject)
    heir, planned = subject.successor(ForwardTimes(FLAT), True), 0
    assert heir.plan().discipline is Discipline.OFF
    for _ in range(64):
        heir.observe_verdict(verdict(0))
        if heir.time_to_plan:
            assert heir.plan().discipline is Discipline.OFF
            planned += 1
    assert planned == 4


@pytest.mark.parametrize("price_us", [1_000, 40_000, 400_000])
def test_probes_cost_no_more_than_their_share_of_the_time(price_us: int) -> None:
    """A drafter on the verifier's host first feeds what it missed, and the verifier waits: what that takes is told."""
    subject = controller()
    learn(subject, 20_000, 0)
    plain_us = ForwardTimes(FLAT).at(1)
    spent_us, elapsed_us, begun, probing = 0.0, 0.0, 0, False
    for _ in range(20_000):
        probing = subject.plan().reason == "probe" if subject.time_to_plan else probing
        begun += probing
        spent_us += price_us if probing else 0.0
        elapsed_us += plain_us + (price_us if probing else 0.0)
        subject.observe_verdict(verdict(int(probing), 0, price_us if probing else 0))
    assert begun >= 2
    assert spent_us <= 0.01 * elapsed_us + price_us


def test_what_others_proposed_and_answered_is_not_a_drafters_doing() -> None:
    decided = verdict(2, 1, delay_us=300)._replace(source=1, answered=2)
    assert decided.seen_by(1) == decided._replace(delay_us=0)
    assert decided.seen_by(2) == decided._replace(width=0)
    assert decided._replace(kind=SourceKind.NGRAM).seen_by(1).width == 0
    assert decided._replace(width=5).seen_by(1).width == len(decided.tokens)


def test_a_drafter_whose_answers_nobody_tests_is_put_off_until_one_is_tested() -> None:
    """A full verifier has no row for them, and on its host they take time from it."""
    subject = controller()
    learn(subject, draft_us=500, accepted=6, times=20)
    for position in range(8):
        assert subject.plan().discipline is Discipline.LOCKSTEP
        subject.observe_verdict(verdict(0, delay_us=2_000, position=position))
    assert subject.plan().discipline is Discipline.OFF
    for position in range(2 * 128):
        subject.observe_verdict(verdict(0, position=position))
    assert subject.plan().reason == "probe"
    observe(subject, 1, tested=2, accepted=2, drafting_us=1_000, delay_us=2_000)
    assert subject.plan().discipline is Discipline.LOCKSTEP
    assert subject.plan().reason != "probe"


def test_a_drafter_that_improves_is_switched_on_again() -> None:
    subject = controller()
    learn(subject, 5_000, 0)
    assert settled(subject).discipline is Discipline.OFF
    learn(subject, 300, 2, tested=2)
    assert subject.plan().discipline is Discipline.LOCKSTEP


def test_a_drafter_that_was_slow_at_its_start_is_used_again_from_the_first_probe_on() -> None:
    """20 of 29 draft tokens were right beside forwards of 10 ms, when a token took 8 ms; from then on it takes 500 us.

    A probe comes after 128 verdicts. That its timing counted as one of thirty kept the drafter off for six of them.
    """
    subject = controller()
    for chain in range(29):
        observe(subject, chain, tested=1, accepted=int(chain % 3 < 2), drafting_us=8_000, delay_us=9_000)
    for position in range(29, 29 + 128):
        plan = settled(subject)
        assert plan.discipline is Discipline.OFF
        subject.observe_verdict(verdict(0, position=100 * position))
        if subject.plan().reason == "probe":
            break
    observe(subject, 29 + 128, tested=2, accepted=1, drafting_us=1_000, delay_us=2_000)
    assert subject.time_to_plan
    plan = subject.plan()
    assert (plan.discipline, plan.reason == "probe") == (Discipline.LOCKSTEP, False)


def test_overhead_of_the_cycle_counts_against_drafting() -> None:
    """A longer chunk pays for a slow cycle up to a point; beyond it, drafting is off except for probes."""

    def plans(delay_us: int) -> tuple[Plan, Plan]:
        subject = controller(forward={1: 10_000.0, 17: 10_300.0})
        learn(subject, draft_us=100, accepted=6, delay_us=delay_us)
        return subject.plan(), settled(subject)

    near, far, hopeless = plans(1_000), plans(12_000), plans(90_000)
    assert 0 < near[0].due <= far[0].due
    assert hopeless[0].reason == "probe"
    assert hopeless[1].discipline is Discipline.OFF


def test_a_floor_is_used_only_while_the_drafters_estimates_hold() -> None:
    def floor(expected: float) -> float:
        subject = controller()
        for chain in range(100):
            observe(subject, chain, 8, 4, 8 * 500, 5_000, expected)
        return subject.plan().pace.confidence_floor

    assert floor(expected=4.0) > 0.05
    assert floor(expected=0.5) == floor(expected=8.0) < 0.05


def test_no_floor_ends_the_chains_of_a_batch() -> None:
    """All wait for the longest."""
    subject = controller()
    for chain in range(100):
        observe(subject, chain, 8, 4, 8 * 500, 5_000, 4.0)
    assert subject.plan().pace.confidence_floor > 0.05
    subject.observe_verdict(verdict(0), batch(500.0))
    plan = subject.plan()
    assert plan.discipline is Discipline.LOCKSTEP
    assert plan.pace.confidence_floor < 0.05


def test_the_floor_lies_between_nothing_and_certainty() -> None:
    for draft_us in (10, 500, 3_000):
        subject = controller()
        learn(subject, draft_us, accepted=7)
        assert 0.0 <= subject.plan().pace.confidence_floor <= 0.95


def test_the_same_events_give_the_same_plans() -> None:
    def plans() -> list[Plan]:
        subject = controller()
        result = []
        for step in range(300):
            observe(subject, step, 4, step % 5, 2_000 + step % 7, 3_000)
            result.append(subject.plan())
        return result

    assert plans() == plans()


def test_a_gain_below_the_least_is_no_gain() -> None:
    """A drafter that is never right, and costs 7 % of a forward per token."""
    subject = controller()
    learn(subject, 700, 0, times=2000)
    assert settled(subject).discipline is Discipline.OFF


def test_a_successor_starts_from_what_was_learnt() -> None:
    useless = controller()
    learn(useless, draft_us=20_000, accepted=0)
    assert useless.plan().reason == "probe"
    assert useless.successor(ForwardTimes(FLAT), True).plan().discipline is Discipline.OFF
    useful = controller()
    learn(useful, draft_us=500, accepted=8)
    heir = useful.successor(ForwardTimes(FLAT), True)
    assert heir.plan().due == useful.plan().due
    learn(heir, draft_us=5_000, accepted=0, times=20)
    assert heir.plan().reason in ("probe", "no gain expected")
    assert useful.plan().discipline is Discipline.LOCKSTEP


def test_a_fixed_plan_stays() -> None:
    plan = parse_plan("lockstep:4")
    assert plan == Plan(Discipline.LOCKSTEP, Pace(4, 4), 4, "fixed")
    planner = Fixed(plan).successor(ForwardTimes(FLAT), True)
    observe(planner, 0, 4, 0, 1000, 9000)
    assert planner.plan() == plan
