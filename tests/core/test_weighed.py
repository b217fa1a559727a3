"""Sessions whose rule weighs draft tokens: what they were drawn from, epochs, whole chunks, no stops by value."""

from __future__ import annotations

import pytest

from specwire.core.draft import DraftSession, fitting
from specwire.core.law.sampling import Sampling, with_rule
from specwire.core.messages import Decision, DraftToken, Outcome, Pace, Proposal, Weights
from specwire.core.text import Ending, Text, hash_of
from specwire.core.verify.chains import Chains, Offer
from specwire.core.verify.session import Allowance, VerifySession

PROMPT = [4, 0, 2]
EPOCH = 11
W = Weights((5, 6, 7, 8), (4, 3, 2, 1))
REJECTION, BLOCK = with_rule(Sampling(1.0, seed=3), "rejection"), with_rule(Sampling(1.0, seed=3), "block")


def proposal(
    *tokens: int, base: int = 3, offset: int = 0, epoch: int = EPOCH, weights: Weights | None = W, source: int = 1
) -> Proposal:
    given = (weights,) * len(tokens) if weights is not None else ()
    return Proposal(source, 0, base, offset, tokens, hash_of(PROMPT[:base]), given, epoch)


def opened(sampling: Sampling, credit: int = 50) -> VerifySession:
    ending = Ending(40, frozenset({0}), frozenset())
    return VerifySession.opened(PROMPT, 3, sampling, ending, Allowance(3, credit), 10, ngram=True, epoch=EPOCH)


# Chains


@pytest.mark.parametrize(
    ("offered", "outcome"),
    [
        (proposal(5, 6), Offer.STARTED),
        (proposal(5, 6, epoch=12), Offer.OTHER_EPOCH),
        (proposal(5, 6, weights=None), Offer.WITHOUT_WEIGHTS),
        (proposal(5, 9), Offer.WITHOUT_WEIGHTS),
        (proposal(5, weights=Weights((5, 10), (1, 1))), Offer.WITHOUT_WEIGHTS),
        (proposal(5, 10), Offer.OUT_OF_RANGE),
    ],
)
def test_only_what_can_be_weighed_is_taken(offered: Proposal, outcome: Offer) -> None:
    chains = Chains(10, weighed=True, epoch=EPOCH)
    assert chains.offer(offered, Text(PROMPT)) is outcome
    assert chains.counts[outcome] == 1


def test_a_chain_keeps_what_each_token_was_drawn_from() -> None:
    chains, text = Chains(10, weighed=True, epoch=EPOCH), Text(PROMPT)
    other = Weights((6, 7, 8), (1, 1, 1))
    chains.offer(proposal(5, 6), text)
    assert chains.offer(proposal(6, 7, offset=1, weights=other), text) is Offer.EXTENDED
    assert chains.best(3).drafts(9) == (DraftToken(5, W), DraftToken(6, W), DraftToken(7, other))
    assert chains.behind(3, (5, 6)) == (1, DraftToken(7, other))
    assert chains.whole(3, 9) == (2, 3)
    assert chains.whole(3, 2) == (2,)
    text.extend((5,))
    chains.advance(text)
    assert chains.whole(4, 9) == (1, 2)


def test_of_several_sources_the_lowest_that_has_a_token_counts() -> None:
    """Not the longer one, nor the better one: no value may have a say."""
    chains, text = Chains(10, weighed=True, epoch=EPOCH), Text(PROMPT)
    chains.offer(proposal(6, 6, 6, source=2), text)
    chains.offer(proposal(5, source=1), text)
    chains.acceptance(1).observe(9, 0)
    assert (chains.best(3).source, chains.window(3, 9)) == (1, (5,))


# The verifier's part


def test_no_guess_from_the_text_is_made() -> None:
    assert opened(REJECTION).ngram is None


def test_each_place_is_drawn_with_a_seed_of_its_own() -> None:
    session = opened(REJECTION)
    seeds = [session.sampling_behind(window).seed for window in ((), (5,), (6,), (5, 6))]
    assert len({*seeds, 3}) == 5
    again = opened(REJECTION)
    again.resume(PROMPT, Allowance(3, 50), epoch=12)
    assert again.sampling_behind(()).seed not in seeds
    coupled = opened(Sampling(1.0, seed=3))
    assert coupled.sampling_behind((5,)).seed == 3, "a coupled text can be replayed"


def test_the_judge_decides_and_its_decision_extends_the_text() -> None:
    session, asked = opened(REJECTION), []
    session.offer(proposal(5, 6, 7))

    def judge(width: int, late: DraftToken | None) -> Decision:
        asked.append((width, late))
        return Decision((5, 8), (Outcome.ACCEPTED, Outcome.RECOVERED))

    verdict = session.resolve([0, 0, 0], (5, 6), judge=judge)
    assert asked == [(2, DraftToken(7, W))]
    assert (verdict.tokens, verdict.width, session.text.tokens) == ((5, 8), 2, [*PROMPT, 5, 8])
    assert session.drafts(9) == (), "the chain is contradicted"


@pytest.mark.parametrize("accepted", [False, True])
@pytest.mark.parametrize("rule", ["rejection", "block", "typical(0.3,0.09)"])
def test_a_step_without_a_window_tells_how_often_a_chain_is_right(rule: str, accepted: bool) -> None:
    """Else windows that were given up where they did not pay would never come back."""
    session = opened(with_rule(Sampling(1.0, seed=3), rule))
    session.offer(proposal(5, 6, 7))
    before = session.chains.acceptance(1).rates(1)[0]
    token, outcome = (5, Outcome.ACCEPTED) if accepted else (8, Outcome.RECOVERED)
    session.resolve([token], (), judge=lambda width, late: Decision((token,), (outcome,)))
    after = session.chains.acceptance(1).rates(1)[0]
    assert after > before if accepted else after < before
    assert session.chains.acceptance(0).rates(1)[0] == before


def test_a_block_s_window_is_whole_or_nothing() -> None:
    session = opened(BLOCK, credit=6)
    session.offer(proposal(5, 6, 7))
    assert session.drafts(9) == (), "three tokens and one more do not fit the room of three"
    session.allow(Allowance(3, 7))
    assert [draft.token for draft in session.drafts(9)] == [5, 6, 7]
    assert session.drafts(2) == ()
    session.allow(Allowance(3, 6))
    assert session.clipped((5, 6, 7)) == ()
    assert opened(REJECTION, credit=6).clipped((5, 6, 7)) == (5, 6)


def test_without_finite_logits_one_token_at_a_time_is_still_tested() -> None:
    session = opened(REJECTION)
    session.offer(proposal(5, 6))
    assert session.can_mistrust
    assert not opened(BLOCK).can_mistrust
    session.mistrust()
    assert session.drafts(9) == ()
    assert session.chains.behind(3, ()) == (1, DraftToken(5, W))


# The drafter's part


def drafting(chunk: int = 2, run_ahead: int = 6) -> DraftSession:
    return DraftSession(PROMPT, Pace(chunk, run_ahead), weighed=True, epoch=EPOCH)


def test_a_chunk_tells_what_each_token_was_drawn_from() -> None:
    session = drafting()
    for token in (5, 6):
        session.drafted(token, W)
        assert session.wants_token
    sent = session.take_proposal()
    assert sent is not None
    assert (sent.tokens, sent.weights, sent.epoch) == ((5, 6), (W, W), EPOCH)


def test_a_chunk_s_length_is_fixed_before_its_first_token() -> None:
    session = drafting(chunk=3)
    session.drafted(5, W)
    session.advance(3, (), Pace(1, 6), EPOCH)
    assert session.take_proposal() is None, "the chunk that was begun has three"
    for token in (6, 7):
        session.drafted(token, W)
    assert (sent := session.take_proposal()) is not None
    assert sent.tokens == (5, 6, 7)
    session.drafted(8, W)
    assert (sent := session.take_proposal()) is not None
    assert sent.tokens == (8,)


def test_another_epoch_voids_what_is_not_decided() -> None:
    session = drafting()
    for token in (5, 6, 7):
        session.drafted(token, W)
    chain = session.chain
    assert session.advance(3, (5,), Pace(2, 6), EPOCH + 1) == 4
    assert (session.line, session.epoch, session.chain) == ([*PROMPT, 5], EPOCH + 1, chain + 1)
    session.drafted(8, W)
    session.drafted(8, W)
    assert (sent := session.take_proposal()) is not None
    assert (sent.base, sent.tokens, sent.weights, sent.epoch) == (4, (8, 8), (W, W), EPOCH + 1)


def test_what_was_decided_meanwhile_takes_its_weights_along() -> None:
    """The line goes on as a new chain: tokens and weights must still belong together."""
    session = drafting(chunk=4)
    others = [Weights((5, token), (1, 1)) for token in (6, 7, 8)]
    for token, weights in zip((6, 7, 8), others, strict=True):
        session.drafted(token, weights)
    session.advance(3, (6, 7), Pace(4, 6), EPOCH)
    for token in (6, 7, 8):
        session.drafted(token, Weights((token,), (1,)))
    assert (sent := session.take_proposal()) is not None
    assert (sent.base, sent.tokens) == (5, (8, 6, 7, 8))
    assert sent.weights[0] == others[2]
    assert [weights.ids for weights in sent.weights[1:]] == [(6,), (7,), (8,)]


def test_the_pace_fits_the_rule() -> None:
    assert fitting(Pace(40, 50, 4), REJECTION) == Pace(16, 50)
    assert fitting(Pace(40, 50, 4), Sampling(1.0)) == Pace(40, 50, 4)
