from __future__ import annotations

import pytest

from specwire.core.expectation import PROBE_AFTER, Expectation

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
    expectation.proposal(5, 0, 1200.0, live=True)
    assert expectation.delay_us == 1200.0
    assert expectation.take_delay() == 1200.0
    assert expectation.take_delay() == 0.0


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
    for index in range(PROBE_AFTER + 2):
        expectation.verdict(index, 1000.0 * index, waited=False)
        expectation.proposal(index - 1, 0, 1000.0 * index + 1, live=False)
    last = 1000.0 * (PROBE_AFTER + 1)
    due = expectation.due(PLAIN)
    assert due is not None
    assert due[0] == pytest.approx(last + 500.5, abs=2)
    expectation.verdict(99, last + 1000.0, waited=True)
    assert expectation.skipped == 0
