"""A verifier's session: windows within the room, outcomes, and nothing behind the end."""

from __future__ import annotations

import pytest

from specwire.core.law.sampling import Sampling
from specwire.core.messages import FinishReason, Outcome, Proposal, SourceKind
from specwire.core.text import Ending, hash_of
from specwire.core.verify.chains import Offer
from specwire.core.verify.session import Allowance, RunningSession, VerifySession

PROMPT = [4, 0, 2]
A, R, B, D = Outcome.ACCEPTED, Outcome.RECOVERED, Outcome.BONUS, Outcome.DIRECT


def opened(tokens: list[int] = PROMPT, credit: int = 50, end: int = 40) -> VerifySession:
    ending = Ending(end, eos_ids=frozenset({0}), stop_ids=frozenset({9}))
    return VerifySession.opened(tokens, len(PROMPT), Sampling(), ending, Allowance(len(tokens), credit), vocabulary=10)


def propose(session: VerifySession, *tokens: int, chain: int = 0, offset: int = 0, source: int = 1) -> Offer:
    base = session.position - offset
    return session.offer(Proposal(source, chain, base, offset, tokens, hash_of(session.text.tokens[:base])))


def test_a_chain_that_was_replaced_during_the_forward_gives_no_late_token() -> None:
    session = opened()
    propose(session, 5)
    window = session.window(8)
    propose(session, 6, 7, chain=1)
    assert session.resolve([5, 7], window).outcomes == (A, B)


@pytest.mark.parametrize(("credit", "width"), [(3, 0), (4, 0), (5, 1), (6, 2), (50, 4)])
def test_a_window_never_decides_beyond_the_credit(credit: int, width: int) -> None:
    session = opened(credit=credit)
    propose(session, 5, 6, 7, 8)
    assert session.room == min(credit, 40) - 3
    assert len(session.window(8)) == width


def test_a_window_never_decides_beyond_max_tokens() -> None:
    session = opened(end=5)
    propose(session, 5, 6, 7, 8)
    window = session.window(8)
    assert window == (5,)
    verdict = session.resolve([5, 6], window)
    assert (verdict.tokens, verdict.finish, session.room) == ((5, 6), FinishReason.LENGTH, 0)


@pytest.mark.parametrize(("token", "reason"), [(0, FinishReason.EOS), (9, FinishReason.STOP_ID)])
def test_nothing_follows_an_end_inside_an_accepted_run(token: int, reason: FinishReason) -> None:
    session = opened()
    propose(session, 5, token, 6)
    verdict = session.resolve([5, token, 6, 7], session.window(8))
    assert (verdict.tokens, verdict.outcomes, verdict.finish) == ((5, token), (A, A), reason)
    assert session.room == 0
    assert session.window(8) == ()


def test_positions_behind_the_end_count_as_untested() -> None:
    session = opened()
    propose(session, 5, 0, 6)
    before = session.chains.acceptance(1).rates(3)
    session.resolve([5, 0, 6, 7], session.window(8))
    after = session.chains.acceptance(1).rates(3)
    assert after[0] > before[0]
    assert after[2] >= after[1] > before[1]


def test_the_prompt_s_own_eos_ends_nothing() -> None:
    assert opened([4, 0, 2]).finish is None


@pytest.mark.parametrize(
    ("tail", "reason"), [([5, 0], FinishReason.EOS), ([5, 9], FinishReason.STOP_ID), ([5, 6], None)]
)
def test_a_text_that_already_holds_its_end_opens_finished(tail: list[int], reason: FinishReason | None) -> None:
    session = opened([*PROMPT, *tail])
    assert session.finish is reason
    assert (session.room == 0) == (reason is not None)


def test_acceptance_is_learnt_from_what_was_tested() -> None:
    session = opened()
    propose(session, 5, 6)
    session.resolve([5, 1, 1], session.window(8))
    first, second, third = session.chains.acceptance(1).rates(3)
    assert first > 0.7 > second
    assert third == second


def test_the_verdict_says_whose_window_was_tested() -> None:
    session = opened()
    propose(session, 5, source=3)
    propose(session, 5, 6, source=4)
    window, source = session.window(8), session.source
    assert (window, source) == ((5, 6), 4)
    propose(session, 5, 7, 7, source=3, chain=1)
    verdict = session.resolve([5, 6, 7], window, source=source)
    assert (verdict.tokens, verdict.outcomes, verdict.source) == ((5, 6, 7), (A, A, B), 4)
    assert session.source is None
    assert session.resolve([5], ()).source == 0


def test_a_source_is_learnt_of_whoever_was_tested() -> None:
    session = opened()
    propose(session, 5, 6, source=1)
    propose(session, 7, 7, 7, source=2)
    session.resolve([5, 6, 7, 7], session.window(8))
    good, poor = session.chains.acceptance(1), session.chains.acceptance(2)
    assert good.rates(1)[0] > 0.7 > poor.rates(1)[0]
    assert good.rates(2)[1] == pytest.approx(good.rates(1)[0]), "one token was decided: nothing is known of the second"
    propose(session, 6, chain=1, source=1)
    propose(session, 6, 6, chain=1, source=2)
    assert session.source == 2, "a poor one still goes first where it reaches farther by more than it errs"


def guessing(tokens: list[int]) -> VerifySession:
    ending = Ending(40, eos_ids=frozenset(), stop_ids=frozenset())
    return VerifySession.opened(
        tokens, len(tokens), Sampling(), ending, Allowance(len(tokens), 50), vocabulary=10, ngram=True
    )


def test_a_guess_is_a_window_within_the_room() -> None:
    session = guessing([1, 2, 3, 4, 1, 2])
    assert session.window(8, SourceKind.NGRAM) == (), "nobody has looked"
    guess = session.look()
    assert guess is not None
    assert session.window(3, SourceKind.NGRAM) == guess.tokens[:3] == (3, 4, 1)
    session.allowance = Allowance(6, 8)
    assert session.window(3, SourceKind.NGRAM) == (3,)
    assert session.window(8) == (), "no chain"


def test_a_guess_that_was_tested_teaches_nothing_about_drafters() -> None:
    session = guessing([1, 2, 3, 4, 1, 2])
    session.look()
    before = session.chains.acceptance(1).rates(3)
    verdict = session.resolve([3, 9, 9, 9], session.window(3, SourceKind.NGRAM), SourceKind.NGRAM)
    assert (verdict.tokens, verdict.outcomes) == ((3, 9), (A, R))
    assert (verdict.width, verdict.kind) == (3, SourceKind.NGRAM)
    assert session.chains.acceptance(1).rates(3) == before
    assert session.window(3, SourceKind.NGRAM) == (), "the guess was for another position"


def test_what_a_guess_decided_contradicts_a_chain() -> None:
    session = guessing([1, 2, 3, 4, 1, 2])
    session.look()
    propose(session, 3, 5)
    session.resolve([3, 4, 1, 2], session.window(3, SourceKind.NGRAM), SourceKind.NGRAM)
    assert session.window(8) == ()
    assert session.offer(Proposal(1, 0, 6, 2, (3,))) is Offer.STALE


def test_a_chain_that_reaches_beyond_a_guess_meets_the_last_row() -> None:
    session = guessing([1, 2, 3, 4, 1, 2])
    session.look()
    window = session.window(2, SourceKind.NGRAM)
    propose(session, 3, 4, 7)
    assert session.resolve([3, 4, 7], window, SourceKind.NGRAM).outcomes == (A, A, A)


def test_without_permission_nothing_is_guessed() -> None:
    session = opened([1, 2, 3, 4, 1, 2])
    assert session.look() is None
    assert session.window(3, SourceKind.NGRAM) == ()


def test_a_wait_before_a_pause_is_not_charged_behind_it() -> None:
    """The credit is used up, so the wait's time is charged to nobody; nor is the wait."""
    session = opened(credit=4)
    running = RunningSession(session, since_us=0.0, waited_us=500.0)
    session.resolve([5], session.window(8))
    assert session.room == 0
    running.allow(Allowance(4, 50), 1_000.0)
    before_us = session.ledger.balance_us
    session.resolve([6], session.window(8))
    running.decided(1_100.0, 1, 100.0)
    assert session.ledger.balance_us == before_us
