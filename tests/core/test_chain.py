"""Every outcome of an offer, and what contradicts a chain."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwire.core.messages import MOST_SOURCES, DraftToken, Proposal
from specwire.core.text import Text, hash_of
from specwire.core.verify.chains import Chains, Offer

PROMPT = [4, 0, 2]


def chunk(tokens: tuple[int, ...], chain: int = 0, base: int = 3, offset: int = 0, source: int = 1) -> Proposal:
    """A chunk of a chain that starts behind PROMPT unless told otherwise."""
    prefix = [*PROMPT, 5, 6, 7][:base]
    return Proposal(source, chain, base, offset, tokens, hash_of(prefix) if offset == 0 else None)


@pytest.fixture
def text() -> Text:
    return Text(PROMPT)


@pytest.fixture
def chains() -> Chains:
    return Chains(vocabulary=10, most_ahead=6)


@pytest.mark.parametrize("prefix_hash", [None, 0, hash_of(PROMPT) ^ 1])
def test_a_wrong_prefix_is_refused(chains: Chains, text: Text, prefix_hash: int | None) -> None:
    assert chains.offer(Proposal(1, 0, 3, 0, (5,), prefix_hash), text) is Offer.WRONG_PREFIX
    assert chains.offer(chunk((5,)), text) is Offer.STARTED


@pytest.mark.parametrize(
    "proposal",
    [
        Proposal(1, 0, 3, 0, (10,), hash_of(PROMPT)),
        Proposal(1, 0, 3, 0, (5, -1), hash_of(PROMPT)),
        Proposal(1, -1, 3, 0, (5,), hash_of(PROMPT)),
        Proposal(1, 0, -1, 0, (5,), hash_of(PROMPT)),
        Proposal(1, 0, 3, -1, (5,), hash_of(PROMPT)),
    ],
)
def test_out_of_range_numbers_are_refused(chains: Chains, text: Text, proposal: Proposal) -> None:
    assert chains.offer(proposal, text) is Offer.OUT_OF_RANGE
    assert chains.window(3, 8) == ()


def test_a_flood_is_cut_off(chains: Chains, text: Text) -> None:
    assert chains.offer(chunk((1,) * 6), text) is Offer.STARTED
    assert chains.offer(chunk((1,), offset=6), text) is Offer.OVER_RUN_AHEAD
    assert chains.window(3, 99) == (1,) * 6
    assert Chains(10, most_ahead=6).offer(chunk((1,) * 7), text) is Offer.OVER_RUN_AHEAD
    assert chains.offer(chunk((99,) * 7, chain=1), text) is Offer.OVER_RUN_AHEAD, "its ids are not even looked at"


def test_a_newer_chain_replaces_the_older_of_its_source_only(chains: Chains, text: Text) -> None:
    chains.offer(chunk((5, 6, 7)), text)
    chains.offer(chunk((8, 8), source=2), text)
    assert chains.offer(chunk((9,), chain=4), text) is Offer.STARTED
    assert chains.offer(chunk((7,), chain=3), text) is Offer.STALE
    assert chains.offer(chunk((7,), chain=0, offset=3), text) is Offer.STALE
    assert chains.window(3, 8) == (8, 8)
    chains.drop(2)
    assert chains.window(3, 8) == (9,)


def test_a_refused_newer_chain_leaves_the_older_one(chains: Chains, text: Text) -> None:
    chains.offer(chunk((5,)), text)
    assert chains.offer(Proposal(1, 1, 3, 0, (6,), 0), text) is Offer.WRONG_PREFIX
    assert chains.window(3, 8) == (5,)


def test_the_longest_chain_gives_the_window_and_ties_go_to_the_lowest_source(chains: Chains, text: Text) -> None:
    chains.offer(chunk((1, 1), source=2), text)
    chains.offer(chunk((2, 2), source=1), text)
    assert chains.window(3, 8) == (2, 2)
    chains.offer(chunk((1,), source=2, offset=2), text)
    assert chains.window(3, 8) == (1, 1, 1)
    assert chains.window(3, 2) == (1, 1)


def test_a_source_that_is_right_more_often_goes_before_one_that_reaches_farther(chains: Chains, text: Text) -> None:
    """Both are held against every text, whoever was tested: the good one need not be tested to be known as good."""
    for chain in range(30):
        position = len(text)
        prefix = text.hash_at(position)
        chains.offer(Proposal(1, chain, position, 0, (5, 6), prefix), text)
        chains.offer(Proposal(2, chain, position, 0, (7,) * 4, prefix), text)
        if chain == 0:
            assert chains.window(position, 16) == (7,) * 4, "nothing is known yet"
        chains.learn((5,), tested=2)
        chains.acceptance(2).observe(1, 0)
        text.extend((5,))
        chains.advance(text)
        assert chains.best(len(text)).source == 1
    assert chains.acceptance(1).rates(1)[0] > 0.9 > 0.2 > chains.acceptance(2).rates(1)[0]
    position = len(text)
    chains.offer(Proposal(1, 99, position, 0, (5,), text.hash_at(position)), text)
    chains.offer(Proposal(2, 99, position, 0, (7,) * 4, text.hash_at(position)), text)
    assert (chains.best(position).source, chains.window(position, 16)) == (1, (5,))


def test_the_tested_source_is_told_elsewhere(chains: Chains, text: Text) -> None:
    chains.offer(chunk((5, 6), source=1), text)
    chains.offer(chunk((5, 7, 7), source=2), text)
    chains.learn((5, 6), tested=2)
    assert chains.acceptance(2).rates(1)[0] == pytest.approx(0.7)
    assert chains.acceptance(1).rates(2)[1] > chains.acceptance(1).rates(1)[0] - 1e-9 > 0.7


def test_the_token_behind_a_window_is_of_any_chain_that_holds_the_window(chains: Chains, text: Text) -> None:
    chains.offer(chunk((5, 6, 7), source=1), text)
    chains.offer(chunk((5, 6, 8), source=2), text)
    chains.offer(chunk((5, 9), source=3), text)
    assert chains.behind(3, (5, 6)) == (1, DraftToken(7))
    chains.drop(1)
    assert chains.behind(3, (5, 6)) == (2, DraftToken(8))
    assert chains.behind(3, (5, 9)) == (0, None)
    assert chains.behind(3, ()) == (2, DraftToken(5))


def test_a_chain_that_is_left_far_behind_is_dropped_and_stays_stale(chains: Chains, text: Text) -> None:
    chains.offer(chunk((5,)), text)
    for _ in range(chains.most_ahead):
        assert list(chains._trees) == [1]
        text.extend((5,))
        chains.advance(text)
    text.extend((5,))
    chains.advance(text)
    assert not chains._trees
    assert chains.offer(chunk((5,), offset=1), text) is Offer.STALE


def test_sources_do_not_pile_up(text: Text) -> None:
    chains = Chains(vocabulary=10)
    for source in range(MOST_SOURCES + 9):
        assert chains.offer(chunk((5,), source=source), text) is Offer.STARTED
    assert len(chains._newest) == len(chains._trees) == MOST_SOURCES


def test_a_source_that_stayed_is_not_forgotten_for_those_that_came_and_went(text: Text) -> None:
    chains = Chains(vocabulary=10)
    chains.offer(chunk((5,), source=1), text)
    for source in range(2, 2 * MOST_SOURCES):
        chains.offer(chunk((5,), source=source), text)
        chains._trees.pop(source)
        chains.acceptance(source)
    assert chains.offer(chunk((6,), source=1, offset=1), text) is Offer.EXTENDED
    assert len(chains._acceptance) <= MOST_SOURCES


def test_every_offer_is_counted(chains: Chains, text: Text) -> None:
    for proposal in (chunk((5,)), chunk((5,)), chunk((99,)), chunk((1,), offset=5)):
        chains.offer(proposal, text)
    assert chains.counts == {Offer.STARTED: 1, Offer.DUPLICATE: 1, Offer.OUT_OF_RANGE: 1, Offer.GAP: 1}


WILD = st.builds(
    lambda source, chain, base, offset, tokens, true: Proposal(
        source, chain, base, offset, tuple(tokens), hash_of([1] * base) if true and 0 <= base < 9 else None
    ),
    st.integers(0, 1),
    st.integers(-1, 3),
    st.integers(-1, 6),
    st.integers(-1, 3),
    st.lists(st.integers(-1, 3), min_size=1, max_size=3),
    st.booleans(),
)


@given(st.lists(WILD | st.integers(0, 2), max_size=40))
def test_a_window_never_contradicts_the_text(events: list[Proposal | int]) -> None:
    """Proposals of any content and decided tokens in any order: what is live agrees with the text everywhere."""
    text, chains = Text([1]), Chains(3, most_ahead=4)
    for event in events:
        if isinstance(event, int):
            text.extend((event,))
            chains.advance(text)
        else:
            chains.offer(event, text)
        for tree in chains._trees.values():
            assert tree.base <= tree.position <= len(text)
            assert tree.position == len(text) or not tree.nodes
            assert len(tree.nodes) <= 4


# ----------------------------------------------------------------------------------------------------------------------
# Trees.


def piece(
    *nodes: tuple[int, int], offset: int = 0, number: int = 0, source: int = 1, base: int = 3, prefix: int | None = None
) -> Proposal:
    """Of (parent, token)."""
    tokens, parents = tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes)
    return Proposal(source, number, base, offset, tokens, prefix, parents=parents)


def test_a_flood_of_nodes_is_cut_off(text: Text) -> None:
    chains = Chains(vocabulary=1000)
    siblings = [(-1, token) for token in range(256)]
    assert chains.offer(piece(*siblings, prefix=text.hash_at(3)), text) is Offer.STARTED
    assert chains.offer(piece((-1, 999), offset=256), text) is Offer.OVER_RUN_AHEAD
    text.extend((7,))
    chains.advance(text)
    assert chains.offer(piece((7, 5), offset=256), text) is Offer.EXTENDED
    assert len(chains._trees[1].nodes) == 1
