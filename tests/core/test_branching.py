"""Trees at the verifier: what is live, what is tested and what is decided, in every small case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from specwire.core.draft import DraftSession, Drawn
from specwire.core.law.sampling import Rule, Sampling, with_rule
from specwire.core.messages import Outcome, Pace, Proposal, Weights
from specwire.core.text import BEFORE, Ending, Text, hash_of
from specwire.core.verify.chains import Chains, Offer
from specwire.core.verify.session import Allowance, VerifySession
from tests.core.branching import (
    PROMPT,
    SOURCE,
    Line,
    Target,
    piece,
    prove_restart,
    prove_text,
    prove_tree,
    prove_two_sources,
    prove_unsound_pieces,
    texts,
    trees,
)
from tests.core.mistakes import DRAFT_MISTAKES, TREE_MISTAKES
from tests.patches import Patch

LAWS = {"greedy": Sampling(), "coupled": Sampling(temperature=1.0, seed=5)}


@pytest.mark.parametrize(("nodes", "vocabulary", "length"), [(3, 2, 3), (2, 3, 3), (3, 3, 2)])
def test_what_descends_from_the_decided_text_is_live_and_nothing_else(nodes: int, vocabulary: int, length: int) -> None:
    for tree, text in product(trees(nodes, vocabulary), texts(length, vocabulary)):
        prove_tree(tree, text, vocabulary)


def test_a_node_behind_what_was_never_sent_changes_nothing() -> None:
    for tree, text in product(trees(2, 2), texts(2, 2)):
        prove_unsound_pieces(tree, text, 2)


def test_sources_do_not_know_of_each_other() -> None:
    for first, second, text in product(trees(2, 2), trees(2, 2), texts(2, 2)):
        prove_two_sources(first, second, text, 2)


@pytest.mark.parametrize("resumed", [False, True])
def test_numbers_that_are_used_again_are_another_tree_s(resumed: bool) -> None:
    for old, new, text in product(trees(2, 2), trees(2, 2), texts(2, 2)):
        prove_restart(old, new, text, 2, resumed)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("nodes", "vocabulary"), [(3, 2), (2, 3)])
def test_every_text_is_the_target_s_own(law: str, nodes: int, vocabulary: int) -> None:
    reached: Counter[Outcome] = Counter()
    for seed, tree in product(range(2), trees(nodes, vocabulary)):
        reached += prove_text(Target(seed, LAWS[law], vocabulary), tree, length=3)
    assert min(reached[Outcome.ACCEPTED], reached[Outcome.RECOVERED]) > 10, "no correction was found waiting"


def test_rules_that_weigh_a_draft_token_take_chains_only() -> None:
    for tree in trees(3, 2):
        proposal = piece(tree, 0, len(tree))
        chains, text = Chains(2, weighed=True), Text(PROMPT)
        offer = chains.offer(proposal, text)
        assert offer is (Offer.BRANCHED if proposal.parents else Offer.WITHOUT_WEIGHTS)
        assert chains.best(len(text)).source is None


RULES = {rule: str(rule) for rule in Rule} | {Rule.THRESHOLD: "threshold(0.3)", Rule.TYPICAL: "typical(0.3,0.3)"}


@pytest.mark.parametrize("rule", Rule)
def test_only_rules_that_look_at_no_proposal_take_a_tree(rule: Rule) -> None:
    sampling = with_rule(Sampling(temperature=0.0 if rule is Rule.GREEDY else 0.8, seed=1), RULES[rule])
    ending = Ending(20, frozenset(), frozenset())
    session = VerifySession.opened(PROMPT, len(PROMPT), sampling, ending, Allowance(len(PROMPT), 20), 4)
    weights = (Weights((0, 1), (1, 1)),) * 2 if sampling.weighed else ()
    branched = Proposal(SOURCE, 0, len(PROMPT), 0, (0, 1), hash_of(PROMPT), weights=weights, parents=(BEFORE, BEFORE))
    assert session.offer(branched) is (Offer.STARTED if sampling.guessed else Offer.BRANCHED)
    assert session.offer(replace(branched, parents=())) is not Offer.BRANCHED


# The drafter's tree


RUN = 40
SEEDS = range(300)


def line_run(random: Random, branches: int | None = None) -> Line:
    """A drafter and a verifier that hears of some of what it sends, under events of every kind."""

    def pace() -> Pace:
        return Pace(random.randint(1, 3), random.randint(0, 9), branches=branches or random.choice((1, 2, 4)))

    session = DraftSession(PROMPT, pace(), chain=random.randrange(3), branching=True)
    line = Line(session, vocabulary=3)
    for _ in range(RUN):
        match random.choice(("draft", "draft", "draft", "deliver", "deliver", "decide", "tell", "tell", "replace")):
            case "draft":
                line.draft([drawn(random) for _ in range(random.randint(1, 4))])
            case "deliver":
                line.deliver(lost=random.random() < 0.1)
            case "decide":
                line.decide(random.randrange(3), random.randrange(3))
            case "tell":
                behind, repeated = random.choice(((0, 0), (0, 1), (1, 0), (2, 2)))
                line.tell(pace() if random.random() < 0.2 else session.pace, behind, repeated)
            case "replace" if random.random() < 0.2:
                line.replace_verifier(len(line.verifier.text) - random.randrange(3))
        line.check()
    return line


def drawn(random: Random) -> Drawn:
    """Some of three tokens, of random likelihoods."""
    tokens = tuple(random.sample(range(3), random.randint(1, 3)))
    return Drawn(tokens, scores=(0.0, *sorted((-random.random() * 2 for _ in tokens[1:]), reverse=True)))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drafter_sends_what_descends_from_the_text_behind_what_it_has_sent(seed: int) -> None:
    line_run(Random(seed))


# What a drafter sent before there were trees: (chain, base, offset, tokens) behind three tokens. A number is drafted
# where the session wants a token, a pair is an advance.
CHAINS = [
    (
        Pace(1, 4),
        (5, 6, (3, (5,)), 7, (4, (9,)), 8),
        [(0, 3, 0, (5,)), (0, 3, 1, (6,)), (0, 3, 2, (7,)), (1, 5, 0, (8,))],
    ),
    (Pace(2, 4), (5, 6, 7, 8, 9, (3, (5, 6)), 9, 1), [(0, 3, 0, (5, 6)), (0, 3, 2, (7, 8)), (0, 3, 4, (9, 1))]),
    (Pace(2, 4), (5, 6, (3, (5, 6, 9)), 1, 2), [(0, 3, 0, (5, 6)), (1, 6, 0, (1, 2))]),
    (Pace(4, 4), (5, 6, 7, (3, (5, 6)), 8, 9, 1), [(1, 5, 0, (7, 8, 9, 1))]),
    (Pace(4, 2), (5, 6, 7, (3, ()), (3, (5,)), 7), [(0, 3, 0, (5, 6)), (0, 3, 2, (7,))]),
    (Pace(2, 6), (5, 6, 7, (3, (5, 6)), (4, ()), 8, 9), [(0, 3, 0, (5, 6)), (1, 4, 0, (8, 9))]),
    (Pace(3, 6), (5, 6, 7, 8, (3, (5, 9)), 1, 2, 3), [(0, 3, 0, (5, 6, 7)), (1, 5, 0, (1, 2, 3))]),
    (Pace(2, 4), (5, 6, (0, (4, 0, 2, 5)), 7, 8), [(0, 3, 0, (5, 6)), (0, 3, 2, (7, 8))]),
    (Pace(1, 0), (5, (3, (6,)), 5), []),
]
Advance = tuple[int, tuple[int, ...]]


@pytest.mark.parametrize("branching", [False, True])
@pytest.mark.parametrize(("pace", "events", "sent"), CHAINS)
def test_one_branch_is_the_chain_that_it_was(
    pace: Pace, events: tuple[int | Advance, ...], sent: list[tuple[int, int, int, tuple[int, ...]]], branching: bool
) -> None:
    session, found = DraftSession([4, 0, 2], pace, branching=branching), []
    for event in events:
        if not isinstance(event, int):
            session.advance(*event, pace)
        elif session.wants_token:
            session.drafted(event)
        while proposal := session.take_proposal():
            assert proposal.parents == ()
            assert (proposal.prefix_hash is None) == (proposal.offset > 0)
            found.append((proposal.chain, proposal.base, proposal.offset, proposal.tokens))
    assert found == sent


# Its teeth


@pytest.mark.parametrize("mistake", TREE_MISTAKES)
def test_a_mistake_is_caught(mistake: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        prove_everything()


@pytest.mark.parametrize("mistake", DRAFT_MISTAKES)
def test_a_drafter_s_mistake_is_caught(mistake: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in SEEDS:
            line_run(Random(seed))


def prove_everything() -> None:
    for tree, text in product(trees(3, 2), texts(3, 2)):
        prove_tree(tree, text, 2)
    test_a_node_behind_what_was_never_sent_changes_nothing()
    test_sources_do_not_know_of_each_other()
    test_numbers_that_are_used_again_are_another_tree_s(resumed=True)
    for tree in trees(3, 2):
        prove_text(Target(0, LAWS["greedy"], 2), tree, length=3)
