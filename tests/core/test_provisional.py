"""What is provisional: the rest of a live chain, as the verifier would hold it, and its text up to the end."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwire.core import messages
from specwire.core.messages import Proposal
from specwire.core.provisional import Ahead, ProvisionalChains, ProvisionalDraft, provisional
from specwire.core.session import Session, State
from specwire.core.text import Text, hash_of
from specwire.core.verify.chains import Chains
from tests.core.script import EOS, LETTERS, VOCABULARY, Script, first_stop
from tests.core.world import FAULTS, PROGRESS, World, random_world

TOKENS = st.integers(0, 2)
MOST = 256


def proposal(
    base: int, tokens: tuple[int, ...], text: Text, chain: int = 0, offset: int = 0, parents: tuple[int, ...] = ()
) -> Proposal:
    prefix = hash_of(text.tokens[:base]) if offset == 0 else None
    return Proposal(0, chain, base, offset, tokens, prefix, parents=parents)


def test_a_chain_stands_until_it_is_contradicted() -> None:
    text = Text((1, 2))
    provisional_chains = ProvisionalChains(10, text)
    provisional_chains.offer(proposal(2, (3, 4, 5), text), text)
    provisional_chains.offer(proposal(2, (6,), text, offset=3), text)
    assert provisional_chains.tail() == (3, 4, 5, 6)
    text.extend((3, 4))
    provisional_chains.follow(text)
    assert provisional_chains.tail() == (5, 6)
    text.extend((9,))
    provisional_chains.follow(text)
    assert provisional_chains.tail() == ()
    provisional_chains.offer(proposal(2, (7,), text, offset=4), text)
    assert provisional_chains.tail() == ()


def test_of_a_tree_the_best_path_is_shown_and_a_sibling_that_is_confirmed_stands_in_its_place() -> None:
    text = Text((1, 2))
    provisional_chains = ProvisionalChains(10, text)
    provisional_chains.offer(proposal(2, (3, 4, 5, 6, 7), text, parents=(-1, 0, 1, 0, 3)), text)
    assert provisional_chains.tail() == (3, 4, 5)
    text.extend((3, 6))
    provisional_chains.follow(text)
    assert provisional_chains.tail() == (7,)
    provisional_chains.offer(proposal(2, (8, 9), text, offset=5, parents=(2, 4)), text)
    assert provisional_chains.tail() == (7, 9), "what stands behind the pruned one is not shown"
    text.extend((8,))
    provisional_chains.follow(text)
    assert provisional_chains.tail() == ()


def test_of_several_sources_the_one_that_is_right_more_often_is_shown() -> None:
    text = Text((1, 2))
    provisional_chains = ProvisionalChains(10, text)

    def offer(chain: int) -> None:
        end, prefix_hash = len(text), text.hash_at(len(text))
        provisional_chains.offer(Proposal(1, chain, end, 0, (3, 3), prefix_hash), text)
        provisional_chains.offer(Proposal(2, chain, end, 0, (4, 4, 4), prefix_hash), text)

    offer(0)
    assert provisional_chains.tail() == (4, 4, 4), "nothing is known yet: the longest"
    for chain in range(1, 20):
        text.extend((3,))
        provisional_chains.follow(text)
        offer(chain)
    assert provisional_chains.tail() == (3, 3)


def test_a_chain_ends_where_the_decided_text_goes_back() -> None:
    text = Text((1, 2))
    provisional_chains = ProvisionalChains(10, text)
    provisional_chains.offer(proposal(2, (3, 4, 5), text), text)
    text.extend((3,))
    provisional_chains.follow(text)
    text.truncate(2)
    provisional_chains.follow(text)
    assert provisional_chains.tail() == ()
    provisional_chains.offer(proposal(2, (6, 7), text, chain=1), text)
    text.truncate(1)
    text.extend((8, 6))  # back and forth between two looks
    provisional_chains.follow(text)
    assert provisional_chains.tail() == ()


def test_what_cannot_be_shown_is_refused() -> None:
    text = Text((1, 2))
    provisional_chains = ProvisionalChains(10, text)
    for bad in (
        proposal(2, (10,), text),
        proposal(1, (3,), text),
        proposal(2, (3,), Text((7, 7))),
        proposal(2, (3,), text, offset=1),
        proposal(2, (3,) * (MOST + 1), text),
    ):
        provisional_chains.offer(bad, text)
        assert provisional_chains.tail() == ()


NODES = st.lists(st.tuples(TOKENS, st.integers(-2, 6)), max_size=6)
OFFERS = st.tuples(st.integers(0, 4), st.integers(0, 8), st.integers(0, 4), NODES, st.booleans())
DECIDED = st.lists(TOKENS, min_size=1, max_size=5)


@given(st.lists(st.one_of(OFFERS, DECIDED), max_size=30), st.lists(st.booleans(), min_size=30, max_size=30))
def test_the_tail_is_what_the_verifier_s_chains_would_hold(
    events: list[tuple[int, int, int, list[tuple[int, int]], bool] | list[int]], looks: list[bool]
) -> None:
    """The verifier aligns with every token; the provisional chains when asked to, or with the next proposal."""
    text = Text((0,))
    provisional_chains, chains = ProvisionalChains(3, text), Chains(3)
    for event, look in zip(events, looks, strict=False):
        if isinstance(event, list):
            for token in event:
                text.extend((token,))
                chains.advance(text)
        else:
            chain, base, offset, nodes, branches = event
            tokens, parents = (tuple(each[at] for each in nodes) for at in (0, 1))
            offered = proposal(min(base, len(text)), tokens, text, chain, offset, parents if branches else ())
            provisional_chains.offer(offered, text)
            chains.offer(offered, text)
        if look:
            provisional_chains.follow(text)
            assert provisional_chains.tail() == chains.window(len(text), MOST)


# With the session: appends under way, lost verifiers, stop strings


def letters(tokens: list[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


class Shown(World):
    """The machine's world with somebody who is shown what is provisional."""

    def _own(self) -> Session:
        session = super()._own()
        self.provisional_chains = ProvisionalChains(VOCABULARY, session.text)
        self.seen: list[ProvisionalDraft] = []
        return session

    def handle(self, event: messages.Event) -> None:
        super().handle(event)
        if isinstance(event, messages.ProposalArrived) and isinstance(event.proposal, Proposal):
            self.provisional_chains.offer(event.proposal, self.session.text)
        if self.session.state not in (State.ENDED, State.FENCED):
            self.look()

    def look(self) -> None:
        self.provisional_chains.follow(self.session.text)
        ahead = Ahead.of(self.session, self.provisional_chains.tail(), self.ending)
        shown = provisional(ahead, self.session, self.scanner)
        self.check_shown(shown)
        self.seen.append(shown)

    def check_shown(self, shown: ProvisionalDraft) -> None:
        assert shown.position == len(self.told_tokens)
        tokens = [*self.told_tokens, *shown.tokens]
        decided = self.session.text.tokens
        common = min(len(tokens), len(decided))
        assert tokens[:common] == decided[:common]
        assert EOS not in shown.tokens[:-1]
        assert len(tokens) <= self.ending.end
        text = letters(tokens[len(self.prompt) :])
        assert self.told_text + shown.text == text[: first_stop(text, self.stops)]
        assert not shown.tokens or first_stop(letters(tokens[len(self.prompt) : -1]), self.stops) is None


@pytest.mark.parametrize("seed", range(60))
def test_provisional_text_continues_what_was_told_whatever_fails(seed: int) -> None:
    random = Random(seed)
    plain = random_world(random)
    world = Shown(plain.script, plain.prompt, plain.ending.end - len(plain.prompt), plain.stops, plain.buffer)
    for _ in range(300):
        action = random.choice(PROGRESS if random.random() < 0.9 else FAULTS)
        world.step(action, random.randrange(8))
    world.finish()


def running(seed: int, rounds: int) -> Iterator[Shown]:
    """A session without faults after each of its rounds; a window takes two of the four draft tokens."""
    world = Shown(Script(seed, quality=6), max_tokens=60, buffer=16)
    for _ in range(rounds):
        for action in ("verifier_ready", "drafter_ready", "round"):
            world.step(action, 2)
        yield world


def test_drafts_are_shown_confirmed_and_taken_back() -> None:
    shown = confirmed = 0
    for seed in range(10):
        (*_, world) = running(seed, 60)
        guesses = [(each.position, each.tokens) for each in world.seen if each.tokens]
        right = [world.oracle.tokens[at : at + len(tokens)] == tokens for at, tokens in guesses]
        shown, confirmed = shown + len(right), confirmed + sum(right)
    assert 0 < confirmed < shown


def test_where_nothing_fails_the_verifier_holds_the_same_chain() -> None:
    compared = 0
    for seed in range(10):
        for world in running(seed, 30):
            if world.over or world.verifier is None:
                continue
            assert world.verifier.text.tokens == world.session.text.tokens
            assert world.provisional_chains.tail() == world.verifier.chains.window(len(world.session.text), MOST)
            compared += bool(world.provisional_chains.tail())
    assert compared > 20
