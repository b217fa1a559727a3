"""Agreement counts a chain's guesses against the text until the first wrong one, whenever they arrive."""

from __future__ import annotations

import pytest

from specwire.core.messages import Proposal
from specwire.core.policy.estimates import REMEMBERED_CHAINS, Agreement
from specwire.core.policy.tunables import AGREEMENT_DECAY

TEXT = (5, 6, 7, 8, 9, 10)


def chunk(chain: int, base: int, offset: int, *tokens: int) -> Proposal:
    return Proposal(1, chain, base, offset, tokens, 0)


def compared(agreement: Agreement) -> tuple[int, int]:
    """(compared, equal) without their decay, for a handful of comparisons."""
    return round(agreement.compared + 0.3), round(agreement.equal + 0.3)


@pytest.mark.parametrize("proposed_at", range(len(TEXT) + 1))
def test_the_order_of_proposals_and_verdicts_does_not_matter(proposed_at: int) -> None:
    agreement = Agreement()
    for index in range(len(TEXT) + 1):
        if index == proposed_at:
            agreement.proposal(chunk(0, 0, 0, 5, 6, 7, 1, 9, 10))
        if index < len(TEXT):
            agreement.decided(index, TEXT[index : index + 1])
    assert compared(agreement) == (4, 3)


def test_chunks_of_a_contradicted_chain_count_no_more() -> None:
    agreement = Agreement()
    agreement.proposal(chunk(0, 0, 0, 5, 1))
    agreement.decided(0, TEXT[:2])
    agreement.proposal(chunk(0, 0, 2, 7, 8))
    agreement.decided(2, TEXT[2:])
    assert compared(agreement) == (2, 1)


def test_a_new_chain_takes_over_and_an_old_one_stays_over() -> None:
    agreement = Agreement()
    agreement.proposal(chunk(3, 0, 0, 1, 1, 1))
    agreement.proposal(chunk(4, 1, 0, 6, 7))
    agreement.proposal(chunk(3, 0, 3, 1))
    agreement.decided(0, TEXT)
    assert compared(agreement) == (2, 2)


def test_a_chunk_without_its_beginning_counts_nothing() -> None:
    agreement = Agreement()
    agreement.proposal(chunk(0, 0, 2, 1, 1))
    agreement.decided(0, TEXT)
    assert agreement.compared == 0


def test_a_piece_whose_parents_do_not_fit_its_tokens_counts_nothing() -> None:
    for parents in ((-1,), (-1, 0, 1), (-7, 9)):
        agreement = Agreement()
        agreement.proposal(Proposal(1, 0, 0, 0, (5, 6), 0, parents=parents))
        agreement.decided(0, TEXT)
        assert agreement.compared == 0


def test_the_rate_follows_what_is_seen_and_can_be_handed_on() -> None:
    agreement = Agreement()
    for base in range(0, 3000, 3):
        agreement.proposal(chunk(base, base, 0, 1, 1))
        agreement.decided(base, (1, 2, 3))
    assert agreement.rate == pytest.approx(0.5, abs=0.02)
    assert agreement.compared == pytest.approx(1 / (1 - AGREEMENT_DECAY), rel=0.01)
    heir = agreement.faded(8.0)
    assert heir.compared == pytest.approx(8.0)
    assert heir.equal / heir.compared == pytest.approx(agreement.equal / agreement.compared)


def test_another_drafter_s_chains_are_numbered_anew() -> None:
    agreement = Agreement()
    agreement.proposal(chunk(7, 0, 0, 5))
    agreement.decided(0, TEXT)
    agreement.proposal(Proposal(2, 0, 1, 0, (6, 7), 0))
    assert compared(agreement) == (3, 3)


def test_what_a_drafter_can_make_it_remember_is_bounded() -> None:
    agreement = Agreement()
    for offset in range(0, 50_000, 50):
        agreement.proposal(chunk(0, 0, offset, *range(50)))
    assert agreement._tree is not None
    assert len(agreement._tree.nodes) <= REMEMBERED_CHAINS


def test_of_a_tree_that_branches_any_child_counts() -> None:
    agreement = Agreement()
    agreement.proposal(Proposal(1, 0, 0, 0, (1, 5, 6, 2), 0, parents=(-1, -1, 1, 1)))
    agreement.decided(0, TEXT[:3])
    assert compared(agreement) == (2, 2)


def test_a_line_that_was_contradicted_goes_on_behind_a_sibling_that_comes_late() -> None:
    agreement = Agreement()
    agreement.proposal(Proposal(1, 0, 0, 0, (2,), 0))
    agreement.decided(0, TEXT)
    agreement.proposal(Proposal(1, 0, 0, 1, (5, 6, 7), parents=(-1, 1, 2)))
    assert compared(agreement) == (4, 3)


def test_a_tree_goes_on_behind_a_sibling_that_comes_late() -> None:
    agreement = Agreement()
    agreement.proposal(Proposal(1, 0, 0, 0, (1, 2), 0, parents=(-1, -1)))
    agreement.decided(0, TEXT)
    agreement.proposal(Proposal(1, 0, 0, 2, (5, 6), parents=(-1, 2)))
    assert compared(agreement) == (3, 2)
