"""How deep a head drafts, and how well it does: learnt from the text, tested or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product, takewhile
from math import inf

import pytest

from specwire.core.law.sampling import Rule, Sampling, with_rule
from specwire.core.messages import Outcome, SourceKind
from specwire.core.policy.estimates import AcceptanceByPosition
from specwire.core.policy.heads import HeadDepth, HeadedText
from specwire.core.policy.tunables import MOST_HEAD_DEPTH
from specwire.core.text import Ending
from specwire.core.verify.session import Allowance, VerifySession
from specwire.core.verify.text_sources import HeadSource, promise
from tests.core.branching import PROMPT, Nodes, Path, Target, piece, trees
from tests.core.mistakes import HEAD_MISTAKES
from tests.patches import Patch


def flat(_rows: int) -> float:
    return 1000.0


def rising(rows: int) -> float:
    return 1000.0 * rows


def chosen(depth: HeadDepth, texts: Sequence[HeadedText], decoding: int, V: Callable[[int], float] = flat) -> int:
    places, found = depth.choose(texts, decoding, V)
    assert (len(places) > 0) == (found > 0)
    return found


def text_of(rate: float, spare_us: float = inf, **more: float) -> HeadedText:
    return HeadedText([rate] * MOST_HEAD_DEPTH, spare_us, **more)  # type: ignore[arg-type]  # by name


def depth_of(rate: float, forward_us: float, sessions: int = 1, others: int = 0) -> int:
    """Where V is flat."""
    return chosen(HeadDepth({1: forward_us}), [text_of(rate)] * sessions, sessions + others)


def test_it_is_the_depth_of_the_best_rate() -> None:
    for rate, forward_us, sessions, others in product((0.3, 0.6, 0.9), (10.0, 100.0, 300.0), (1, 4), (0, 3)):
        tokens = [sessions * sum(rate**k for k in range(1, depth + 1)) for depth in range(MOST_HEAD_DEPTH + 1)]
        rates = [
            (sessions + others + more) / (1000.0 + depth * forward_us) / (1.0 if depth else 1 / 1.02)
            for depth, more in enumerate(tokens)
        ]
        assert depth_of(rate, forward_us, sessions, others) == rates.index(max(rates))
    assert depth_of(0.9, 1.0) == MOST_HEAD_DEPTH
    assert depth_of(0.3, 500.0) == 0


def test_on_a_full_verifier_it_does_not_draft() -> None:
    assert chosen(HeadDepth({1: 100.0}), [text_of(0.9)], 1, rising) == 0


def test_no_more_is_asked_than_the_head_has() -> None:
    assert chosen(HeadDepth({1: 1.0}, 3), [text_of(0.9)], 1) == 3
    assert chosen(HeadDepth({1: 1.0}, 1), [HeadedText([0.9], inf)], 1) == 1


def test_what_its_forwards_take_is_refined_and_charged_as_it_is_expected() -> None:
    depth = HeadDepth({1: 100.0, 4: 200.0})
    before = chosen(depth, [text_of(0.6)], 1)
    assert depth.observe(1, 4, 0, 50_000.0) == 400.0, "a hiccup is nobody's debt"
    for _ in range(200):
        depth.observe(1, 4, 0, 4 * 300.0)
    assert depth.observe(1, 4, 0, 1200.0) == pytest.approx(1200.0)
    assert 0 <= chosen(depth, [text_of(0.6)], 1) < before


def test_what_it_reads_does_not_make_its_drafts_seem_slow() -> None:
    """Each time 200 positions of 10 us beside two forwards of 100 us."""
    depth = HeadDepth({1: 100.0}, row_us=10.0)
    for _ in range(20):
        depth.observe(1, 2, 200, 2200.0)
    assert depth.drafting_us(1, 2) == pytest.approx(200.0)
    assert depth.readable(depth.reading_us(50)) == 50.0
    assert HeadDepth({1: 100.0}).readable(1.0) == inf


@pytest.mark.parametrize(("decided", "right"), [([5, 6, 7, 8], 3), ([5, 9], 1), ([5, 6], 2), ([9], 0)])
def test_acceptance_is_learnt_from_the_text(decided: list[int], right: int) -> None:
    text = [1, 2, 3]
    source = HeadSource(text, AcceptanceByPosition())
    source.propose([5, 6, 7])
    guess = source.look()
    assert guess is not None
    assert (guess.position, guess.tokens, guess.kind) == (3, (5, 6, 7), SourceKind.HEAD)
    before = source.acceptance.rates(3)
    text += decided
    assert source.look() is None
    source.text_grew()
    after = source.acceptance.rates(3)
    assert [new > old for new, old in zip(after, before, strict=True)][:right] == [True] * right
    if right < min(len(decided), 3):
        assert after[right] < before[right]


def test_nothing_is_proposed_where_nothing_was_drafted() -> None:
    source = HeadSource([1], AcceptanceByPosition())
    source.propose([])
    assert not source.proposed
    source.text_grew()


def test_what_is_there_for_nothing_is_beaten_by_more_tokens_in_a_time() -> None:
    """At 0.7 a position three tokens decide 2.53 in 1.6 ms: as many as 0.9 more than one would be in their time."""
    head = HeadDepth({1: 200.0}, most=3)
    assert chosen(head, [text_of(0.7, instead=0.8)], 1)
    assert not chosen(head, [text_of(0.7, instead=0.95)], 1)


def test_what_a_head_drafted_is_tested_before_a_longer_guess_that_is_less_sure() -> None:
    """Both repeat the text, whose own guess goes on for longer and promises more in all."""
    text = [5, 6, 7, 8] * 5
    ending = Ending(400, frozenset(), frozenset())
    session = VerifySession.opened(
        text, len(text), Sampling(), ending, Allowance(400, 400), 100, ngram=True, head=AcceptanceByPosition()
    )
    assert session.head is not None
    assert session.ngram is not None
    session.head.propose([5, 6])
    for _ in range(200):
        session.head.acceptance.observe(2, 2)
    copied, drafted = session.ngram.look(), session.head.look()
    assert copied is not None
    assert drafted is not None
    assert promise(copied, 2) < promise(drafted) < promise(copied)
    assert session.look() == drafted


def test_a_shallow_draft_in_the_place_of_a_deep_one_need_not_pay() -> None:
    """The first forward takes as much as all others together."""
    head = HeadDepth({1: 50.0}, first_us={1: 700.0})
    assert chosen(head, [text_of(0.65)], 1) > 2
    assert chosen(head, [text_of(0.65, 749.0)], 1) == 0, "it can bear one token only"


@pytest.mark.parametrize(("spare_us", "depth"), [(400.0, 4), (250.0, 2), (150.0, 1), (99.0, 0), (-5.0, 0)])
def test_no_deeper_draft_than_a_ledger_bears_if_all_of_it_is_wrong(spare_us: float, depth: int) -> None:
    forwards = HeadDepth({1: 100.0, 2: 100.0}, most=4)
    assert chosen(forwards, [text_of(0.9, spare_us)], 1) == depth
    both = [text_of(0.9, 2 * spare_us)] * 2
    assert chosen(forwards, both, 4) == depth, "all that wait are paid for, by those it drafts for"


def test_who_cannot_bear_its_part_goes_without_and_the_others_bear_more() -> None:
    """All four wait 400 us for a token: 400 us each where four share it, 800 where two do."""
    head = HeadDepth({1: 400.0}, most=1)
    for spares, places in (([400.0] * 4, 4), ([800.0, 800.0, 0.0, 0.0], 2), ([800.0, 400.0, 0.0, 0.0], 0)):
        able = head.able([text_of(0.9, spare_us) for spare_us in spares], 1, 4, flat)
        assert len(able) == places


# Texts, whatever a head proposes


class Noted(AcceptanceByPosition):
    """What was observed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[int, int]] = []

    def observe(self, tested: int, accepted: int) -> None:
        self.said.append((tested, accepted))
        super().observe(tested, accepted)


LAWS = {"greedy": Sampling(), "coupled": Sampling(temperature=1.0, seed=5)}
LENGTH = 4


def session_of(target: Target, decided: int, noted: Noted) -> VerifySession:
    end = len(PROMPT) + LENGTH
    ending, allowance = Ending(end, frozenset(), frozenset()), Allowance(len(PROMPT) + decided, end)
    return VerifySession.opened(
        target.text(decided), len(PROMPT), target.sampling, ending, allowance, target.vocabulary, head=noted
    )


def agreed(proposal: Path, text: Path) -> int:
    """How many tokens of a proposal a text begins with."""
    common = takewhile(lambda pair: pair[0] == pair[1], zip(proposal, text, strict=False))
    return len(list(common))


def prove_head(target: Target, proposal: Path, nodes: Nodes) -> Counter[Outcome]:
    """Every forward in every state: behind every text, with every width, beside what a drafter sent meanwhile."""
    plain, reached = target.text(LENGTH), Counter[Outcome]()
    for decided, width in product(range(LENGTH), range(len(proposal) + 1)):
        noted = Noted()
        session = session_of(target, decided, noted)
        assert session.head is not None
        session.head.propose(proposal)
        session.look()
        window = session.window(width, SourceKind.HEAD)
        assert window == proposal[: min(width, LENGTH - decided - 1)]
        if nodes:
            session.offer(piece(nodes, 0, len(nodes)))
        rows = [target.next((*session.text.tokens, *window[:at])) for at in range(len(window) + 1)]
        verdict = session.resolve(rows, window, SourceKind.HEAD)
        seen = target, proposal, nodes, decided, window, verdict
        text = tuple(session.text.tokens)
        assert verdict.tokens, seen
        assert text == plain[: len(PROMPT) + decided + len(verdict.tokens)], seen
        right = agreed(window, plain[len(PROMPT) + decided :])
        assert verdict.outcomes[:right] == (Outcome.ACCEPTED,) * right, seen
        told = min(len(proposal), len(verdict.tokens))
        assert noted.said == [(told, min(told, agreed(proposal, verdict.tokens)))], seen
        session.look()
        assert session.window(len(proposal), SourceKind.HEAD) == (), "it was proposed behind another text"
        reached += Counter(verdict.outcomes)
    return reached


def prove_all_texts(law: str, depth: int, vocabulary: int) -> Counter[Outcome]:
    beside = [(), *trees(2, 2)]
    reached: Counter[Outcome] = Counter()
    for seed, proposal, nodes in product(range(2), product(range(vocabulary), repeat=depth), beside):
        reached += prove_head(Target(seed, LAWS[law], vocabulary), proposal, nodes)
    return reached


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("depth", "vocabulary"), [(4, 2), (3, 3)])
def test_every_text_is_the_target_s_own_whatever_is_proposed(law: str, depth: int, vocabulary: int) -> None:
    reached = prove_all_texts(law, depth, vocabulary)
    assert min(reached[each] for each in (Outcome.ACCEPTED, Outcome.RECOVERED, Outcome.BONUS)) > 100


RULES = {rule: str(rule) for rule in Rule} | {Rule.THRESHOLD: "threshold(0.3)", Rule.TYPICAL: "typical(0.3,0.3)"}


@pytest.mark.parametrize("rule", Rule)
def test_a_rule_that_looks_at_draft_tokens_takes_none_of_a_head(rule: Rule) -> None:
    prove_rule(rule)


def prove_rule(rule: Rule) -> None:
    sampling = with_rule(Sampling(temperature=0.0 if rule is Rule.GREEDY else 0.8, seed=1), RULES[rule])
    session = session_of(Target(0, sampling, 2), 0, Noted())
    assert (session.head is not None) is (rule in (Rule.GREEDY, Rule.COUPLED))


@pytest.mark.parametrize("mistake", HEAD_MISTAKES)
def test_a_mistake_is_caught(mistake: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        prove_all_texts("greedy", depth=3, vocabulary=2)
        for rule in Rule:
            prove_rule(rule)


def test_the_first_forward_of_a_draft_may_take_longer_than_further_ones() -> None:
    head = HeadDepth({1: 100.0}, first_us={1: 400.0})
    assert [head.drafting_us(1, depth) for depth in (1, 2, 4)] == [400.0, 500.0, 700.0]
    assert chosen(head, [text_of(0.9)], 1) > chosen(HeadDepth({1: 400.0}), [text_of(0.9)], 1)
    head.pace = 2.0
    assert head.drafting_us(1, 2) == 1000.0, "on a machine that is half as fast"


def test_features_that_make_a_step_longer_must_be_won_back_too() -> None:
    """At 0.3 a first guess wins 1.3 tokens for 1.1 steps; with 0.2 of a step for features it loses."""
    text = HeadedText([0.3] + [0.0] * (MOST_HEAD_DEPTH - 1), inf)
    free, dear = HeadDepth({1: 100.0}), HeadDepth({1: 100.0}, tapped_us={1: 200.0, 4: 200.0})
    assert (chosen(free, [text], 1), chosen(dear, [text], 1)) == (1, 0)
    assert (free.tapped_us(8), dear.tapped_us(8)) == (0.0, 200.0)


def test_what_is_read_before_is_borne_too() -> None:
    head = HeadDepth({1: 100.0}, most=1, row_us=10.0)
    assert chosen(head, [text_of(0.9, 1100.0, read=100)], 1) == 1
    assert chosen(head, [text_of(0.9, 1099.0, read=100)], 1) == 0
