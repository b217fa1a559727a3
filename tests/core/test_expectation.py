from __future__ import annotations

import pytest

from specwire.core.policy.costs import MOST_AWAITED, Expectation, Expectations, Turn
from specwire.core.policy.tunables import TRIAL_VERDICTS

PLAIN = 1000.0


def answered(delay: float, times: int = 20) -> Expectation:
    """Each verdict ends one position further, and a new chain answers it `delay` later; one more verdict at 100,000."""
    expectation = Expectation()
    for index in range(times):
        expectation.verdict(index, 1000.0 * index, waited=True)
        expectation.proposal(index, 0, 1000.0 * index + delay, live=True)
    expectation.verdict(times, 100_000.0, waited=True)
    return expectation


def test_nothing_is_due_before_the_first_verdict() -> None:
    assert Expectation().due(PLAIN) is None


def test_guesses_before_it_knows() -> None:
    expectation = Expectation()
    expectation.verdict(5, 0.0, waited=False)
    assert expectation.due(PLAIN) == (500.0, 1000.0)


def test_learns_the_delay() -> None:
    due = answered(300.0).due(PLAIN)
    assert due is not None
    expected, latest = due
    assert expected == pytest.approx(100_300.0, abs=1)
    assert 100_390.0 <= latest <= 100_520.0


def test_nothing_is_due_once_the_answer_is_here() -> None:
    expectation = answered(300.0)
    expectation.proposal(20, 0, 100_100.0, live=True)
    assert expectation.due(PLAIN) is None


def test_answer_to_an_older_verdict_is_measured_from_that_one() -> None:
    expectation = Expectation()
    expectation.verdict(5, 0.0, waited=False)
    expectation.verdict(6, 1000.0, waited=False)
    assert expectation.proposal(5, 0, 1200.0, live=True) == 1200.0
    assert expectation.delay_us == 1200.0
    assert expectation.proposal(5, 4, 1300.0, live=True) == 0.0, "it goes on"


def test_chunk_of_a_chain_that_goes_on_answers_the_last_verdict() -> None:
    expectation = Expectation()
    expectation.verdict(5, 0.0, waited=False)
    expectation.verdict(6, 1000.0, waited=False)
    expectation.proposal(2, 4, 1200.0, live=True)
    expectation.proposal(2, 6, 1900.0, live=True)
    assert expectation.delay_us == 200.0


def test_dead_proposal_teaches_the_delay_but_is_no_answer() -> None:
    expectation = Expectation()
    expectation.verdict(5, 0.0, waited=False)
    expectation.verdict(6, 1000.0, waited=False)
    expectation.proposal(5, 0, 1200.0, live=False)
    assert expectation.delay_us == 1200.0
    assert expectation.due(PLAIN) is not None


def test_an_answer_drafted_beside_a_forward_on_the_same_cores_teaches_no_delay() -> None:
    """Where it is waited for it comes far sooner: by its delay no ledger could bear to wait."""
    expectation, turn = Expectation(), Turn(2, 3_000.0)
    expectation.verdict(5, 0.0, waited=False)
    assert expectation.proposal(5, 0, 40_000.0, live=True, turn=turn, apart=False) == 0.0
    assert expectation.arrived
    expectation.verdict(6, 50_000.0, waited=False)
    assert expectation.due(PLAIN, turn) == (56_000.0, 56_000.0)
    assert expectation.proposal(6, 0, 56_000.0, live=True, turn=turn) == 6_000.0


def test_proposal_for_a_text_of_long_ago_teaches_nothing() -> None:
    expectation = Expectation()
    expectation.verdict(5, 0.0, waited=False)
    expectation.proposal(4, 0, 100.0, live=True)
    assert expectation.delay_us is None


def test_chance_falls_with_every_verdict_that_came_first_and_rises_again() -> None:
    expectation = answered(300.0)
    for index in range(10):
        expectation.verdict(21 + index, 200_000.0 + 1000.0 * index, waited=True)
    low = expectation.chance
    assert low < 0.2
    for index in range(10):
        now = 300_000.0 + 1000.0 * index
        expectation.verdict(40 + index, now, waited=False)
        expectation.proposal(40 + index, 0, now + 300.0, live=True)
    assert expectation.chance > 0.8


def test_tries_a_shorter_delay_after_many_steps_without_waiting() -> None:
    expectation = Expectation()
    for index in range(TRIAL_VERDICTS + 2):
        expectation.verdict(index, 1000.0 * index, waited=False)
        expectation.proposal(index - 1, 0, 1000.0 * index + 1, live=False)
    last = 1000.0 * (TRIAL_VERDICTS + 1)
    due = expectation.due(PLAIN)
    assert due is not None
    assert due[0] == pytest.approx(last + 500.5, abs=2)
    expectation.verdict(99, last + 1000.0, waited=True)
    assert expectation.skipped == 0


# Several sources


def heard(*delays: float, verdicts: int = 20) -> Expectations:
    """Each verdict ends one position further; source 1, 2, ... answers each with a new chain, `delays` later."""
    expectations = Expectations()
    for index in range(verdicts):
        expectations.verdict(index, 10_000.0 * index, waited=True)
        for source, delay in enumerate(delays, 1):
            expectations.proposal(source, index, 0, 10_000.0 * index + delay, live=True)
    expectations.verdict(verdicts, 1e6, waited=True)
    return expectations


def test_each_source_has_a_delay_of_its_own_and_the_first_is_waited_for() -> None:
    due = heard(3000.0, 300.0).due(PLAIN)
    assert due is not None
    assert due.source == 2
    assert due.expected_us == pytest.approx(1e6 + 300.0, abs=1)


def test_when_one_has_answered_the_other_is_due() -> None:
    expectations = heard(3000.0, 300.0)
    expectations.proposal(2, 20, 0, 1e6 + 300.0, live=True)
    due = expectations.due(PLAIN)
    assert due is not None
    assert due.source == 1
    assert due.expected_us == pytest.approx(1e6 + 3000.0, abs=1)
    expectations.proposal(1, 20, 0, 1e6 + 3000.0, live=True)
    assert expectations.due(PLAIN) is None


def test_one_that_is_gone_is_not_waited_for_long() -> None:
    expectations = heard(3000.0, 300.0)
    for index in range(10):
        expectations.verdict(21 + index, 2e6 + 10_000.0 * index, waited=True)
        expectations.proposal(1, 21 + index, 0, 2e6 + 10_000.0 * index + 3000.0, live=True)
    expectations.verdict(40, 3e6, waited=True)
    due = expectations.due(PLAIN)
    assert due is not None
    assert due.source == 1


def test_an_answer_of_more_tokens_than_before_is_expected_later_and_waited_for_as_planned() -> None:
    expectations = Expectations()
    for index in range(20):
        expectations.verdict(index, 10_000.0 * index, waited=False)
        expectations.proposal(1, index, 0, 10_000.0 * index + 900.0, True, Turn(4, 200.0))
    expectations.verdict(20, 1e6, waited=False)
    for tokens, later_us in ((4, 0.0), (8, 800.0), (2, -400.0)):
        due = expectations.due(PLAIN, {1: Turn(tokens, 200.0)})
        assert due is not None
        assert due.expected_us == pytest.approx(1e6 + 900.0 + later_us, abs=1)
        assert due.chance == 1.0


def test_before_anybody_proposed_the_guess_is_that_of_one() -> None:
    expectations = Expectations()
    assert expectations.due(PLAIN) is None
    expectations.verdict(5, 0.0, waited=False)
    due = expectations.due(PLAIN)
    assert due is not None
    assert (due.expected_us, due.latest_us) == (500.0, 1000.0)


def test_sources_that_came_and_went_do_not_pile_up() -> None:
    expectations = Expectations()
    expectations.verdict(5, 0.0, waited=False)
    for source in range(3 * MOST_AWAITED):
        expectations.proposal(source, 5, 0, 100.0, live=True)
    assert sorted(expectations.by_source) == list(range(2 * MOST_AWAITED, 3 * MOST_AWAITED))
