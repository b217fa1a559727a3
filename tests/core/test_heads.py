"""How deep a head drafts, and how well it does: learnt from the text, tested or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product, takewhile
from math import inf
from random import Random

import pytest

from specwire.core.law.sampling import Rule, Sampling, with_rule
from specwire.core.messages import Outcome, SourceKind
from specwire.core.policy.estimates import AcceptanceByPosition
from specwire.core.policy.heads import FeatureRetention, HeadAcceptance, HeadDepth, LearntHead
from specwire.core.policy.tunables import EXPLORED_SHARE, MOST_HEAD_DEPTH
from specwire.core.policy.windows import StepCandidate, divided
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


def depth_of(rate: float, forward_us: float, sessions: int = 1, others: int = 0) -> int:
    """Where V is flat."""
    return HeadDepth({1: forward_us}).choose([[rate] * MOST_HEAD_DEPTH] * sessions, sessions + others, flat)


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


def test_on_a_full_verifier_it_does_not_draft_but_is_tried_now_and_then() -> None:
    depth = HeadDepth({1: 100.0})
    rates = [[0.9] * MOST_HEAD_DEPTH]
    depth.observe(1, 2, 200.0, 0.0)
    assert depth.choose(rates, 1, rising) == 0
    assert not depth.due(200.0 / EXPLORED_SHARE - 1)
    assert depth.due(200.0 / EXPLORED_SHARE)
    depth.tried(5000.0, begins=True)  # a long text had to be read
    assert not depth.due(200.0 / EXPLORED_SHARE)
    assert depth.due(5000.0 / EXPLORED_SHARE)


def test_no_more_is_asked_than_the_head_has() -> None:
    assert HeadDepth({1: 1.0}, 3).choose([[0.9] * MOST_HEAD_DEPTH], 1, flat) == 3
    assert HeadDepth({1: 1.0}, 1).choose([[0.9]], 1, flat) == 1
    assert HeadDepth({1: 100.0}, 1).due(100.0 / EXPLORED_SHARE)


def test_what_its_forwards_take_is_refined() -> None:
    depth = HeadDepth({1: 100.0, 4: 200.0})
    rates = [[0.6] * MOST_HEAD_DEPTH]
    before = depth.choose(rates, 1, flat)
    for _ in range(200):
        depth.observe(1, 4, 4 * 300.0, 0.0)
    assert 0 <= depth.choose(rates, 1, flat) < before


def test_what_it_reads_of_steps_without_a_draft_does_not_make_its_drafts_seem_slow() -> None:
    """Each time 200 positions of 10 us beside two forwards of 100 us: a draft behind the last step takes these."""
    depth = HeadDepth({1: 100.0}, row_us=10.0)
    for _ in range(20):
        depth.observe(1, 2, 2200.0, 0.0, rows=200)
    assert depth.drafting_us(1, 2) == pytest.approx(200.0)


@pytest.mark.parametrize(("decided", "right"), [([5, 6, 7, 8], 3), ([5, 9], 1), ([5, 6], 2), ([9], 0)])
def test_acceptance_is_learnt_from_the_text(decided: list[int], right: int) -> None:
    text = [1, 2, 3]
    source = HeadSource(text, LearntHead())
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
    source = HeadSource([1], LearntHead())
    source.propose([])
    assert not source.proposed
    source.text_grew()


def test_a_session_begins_with_what_others_learnt_under_the_same_kind_of_rule() -> None:
    known = HeadAcceptance()
    for _ in range(40):
        text = [1]
        source = HeadSource(text, known.of(0.0))
        source.propose([5, 6])
        text += [5, 6, 7]
        source.text_grew()
    fresh, drawn = HeadSource([1], known.of(0.0)), HeadSource([1], known.of(0.8))
    assert fresh.acceptance.rates(2)[0] > 0.9
    assert drawn.acceptance.rates(2) == AcceptanceByPosition().rates(2)


def confident(classes: Callable[[bool], float], rate: float = 0.7, tokens: int = 600) -> HeadSource:
    """Behind proposals of four tokens each, of which `classes` says how sure the head was, by whether one was right."""
    random, learnt = Random(1), LearntHead()
    for _ in range(tokens // 4):
        text = [1]
        source = HeadSource(text, learnt)
        hits = [random.random() < rate for _ in range(4)]
        source.propose([5, 6, 7, 8], [classes(hit) for hit in hits])
        text += [token if hit else 9 for token, hit in zip((5, 6, 7, 8), hits, strict=True)]
        source.text_grew()
    return HeadSource([1], learnt)


def telling(hit: bool) -> float:
    return 0.85 if hit else 0.25


def test_a_proposal_has_the_head_s_own_probabilities_as_far_as_they_come_true() -> None:
    source = confident(telling)
    assert source.confidence.trusted
    source.propose([5, 6, 7], [0.89, 0.2, 0.81])
    guess = source.look()
    assert guess is not None
    first, second, third = guess.acceptance.rates(3)
    assert first == third > 0.95
    assert second < 0.05
    assert guess.acceptance.expected(3) == pytest.approx(1 + first + first * second + first * second * third)


@pytest.mark.parametrize("sure", [0.99, 0.05, None], ids=["too sure", "not sure enough", "at random"])
def test_probabilities_that_tell_nothing_leave_a_proposal_what_its_positions_tell(sure: float | None) -> None:
    """What is too high, or too low, all the same tells nothing of which tokens are right."""
    random = Random(2)

    def said(_hit: bool) -> float:
        return random.random() if sure is None else sure

    source = confident(said)
    source.propose([5, 6], [said(True), said(True)])
    guess = source.look()
    assert guess is not None
    assert guess.acceptance.rates(2) == pytest.approx(source.acceptance.rates(2), abs=0.2)


def test_a_step_s_rows_go_where_the_head_is_sure() -> None:
    """A row is worth it where it decides more than every fifth token."""
    source = confident(telling)

    def candidate(slot: int, sure: Sequence[float]) -> StepCandidate:
        source.propose([5, 6, 7, 8], sure)
        return StepCandidate(slot, 9, 1, 0, 1e9, AcceptanceByPosition(), guess=source.look())

    candidates = [candidate(0, [0.89] * 4), candidate(1, [0.2] * 4), candidate(2, [0.89, 0.89, 0.2, 0.89])]
    windows = divided(candidates, lambda rows: 1000.0 + 100.0 * rows)
    assert [windows.of(slot).width for slot in range(3)] == [4, 0, 2]


@pytest.mark.parametrize(("sure", "forwards"), [(0.89, 8), (0.2, 1)])
def test_a_draft_ends_where_a_further_forward_would_hardly_decide_anything(sure: float, forwards: int) -> None:
    source, depth, rates = confident(telling), HeadDepth({1: 30.0}), [[0.8] * MOST_HEAD_DEPTH]
    assert depth.choose(rates, 1, flat) == MOST_HEAD_DEPTH
    deepening = depth.deepening(rates, [source.confidence], 1, flat)
    while deepening.goes_on([0], [sure]) and len(deepening.sure[0]) < MOST_HEAD_DEPTH:
        pass
    assert len(deepening.sure[0]) == forwards


def test_a_draft_goes_on_while_it_pays_for_all_texts_together_and_a_try_to_its_end() -> None:
    known, rates = confident(telling).confidence, [[0.8] * MOST_HEAD_DEPTH] * 4

    def goes_on(sure: Sequence[float], forward_us: float, pays: bool = True) -> bool:
        depth = HeadDepth({1: forward_us})
        assert (depth.choose(rates, 4, flat) > 0) == pays
        return depth.deepening(rates, [known] * 4, 4, flat).goes_on(range(4), sure)

    assert goes_on([0.89] * 4, 400.0)
    assert goes_on([0.89, 0.2, 0.2, 0.2], 50.0)
    assert not goes_on([0.89, 0.2, 0.2, 0.2], 400.0)
    assert goes_on([0.2] * 4, 4000.0, pays=False)
    # Nothing is known of how often what it is sure of is right.
    depth, fresh = HeadDepth({1: 100.0}), LearntHead().by_confidence
    assert depth.choose(rates, 4, flat)
    assert depth.deepening(rates, [fresh] * 4, 4, flat).goes_on(range(4), [0.01] * 4)


def test_what_is_there_for_nothing_is_beaten_by_more_tokens_in_a_time() -> None:
    """At 0.7 a position three tokens decide 2.53 in 1.6 ms, so 1.58 in the time of a step that takes as long."""
    head, rates = HeadDepth({1: 200.0}, most=3), [0.7, 0.7, 0.7]
    assert head.beats([0.57], rates, 1, flat)
    assert not head.beats([0.59], rates, 1, flat)
    assert head.beats([], rates, 1, flat)
    assert not HeadDepth({1: 2000.0}).beats([], rates, 1, flat)
    assert head.beats([0.8], rates, 4, flat), "of four sessions each bears a quarter of the forwards"

    def steep(rows: int) -> float:
        return 900.0 + 100.0 * rows

    assert not HeadDepth({1: 300.0}, most=3).beats([0.6] * 16, rates, 1, steep), "its beginning is worth more than all"


def test_what_a_head_drafted_is_tested_before_a_longer_guess_that_is_less_sure() -> None:
    """Both repeat the text, whose own guess goes on for longer and promises more in all."""
    text = [5, 6, 7, 8] * 5
    ending = Ending(400, frozenset(), frozenset())
    session = VerifySession.opened(
        text, len(text), Sampling(), ending, Allowance(400, 400), 100, ngram=True, head=LearntHead()
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
    assert session.look(drafts=False) == copied


def test_a_shallow_draft_in_the_place_of_a_deep_one_need_not_pay() -> None:
    """The first forward takes as much as all others together."""
    head = HeadDepth({1: 50.0}, first_us={1: 700.0})
    rates = [0.65] * MOST_HEAD_DEPTH
    assert head.choose([rates], 1, flat) > 2
    assert [head.gains(rates, depth, 1, 1, flat) for depth in (1, 2, MOST_HEAD_DEPTH)] == [False, True, True]


@pytest.mark.parametrize(("spare_us", "depth"), [(1300.0, 4), (700.0, 2), (150.0, 1), (99.0, 0), (-5.0, 0)])
def test_no_more_is_risked_at_once_than_a_part_of_what_may_be_lost(spare_us: float, depth: int) -> None:
    forwards = HeadDepth({1: 100.0, 2: 100.0})
    assert forwards.borne(4, 1, 1, flat, spare_us) == depth
    assert forwards.borne(4, 2, 4, flat, 2 * spare_us) == depth, "all that wait are paid for, by those it drafts for"


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
        target.text(decided), len(PROMPT), target.sampling, ending, allowance, target.vocabulary, head=LearntHead(noted)
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
    rates = [[0.9] * MOST_HEAD_DEPTH]
    assert head.choose(rates, 1, flat) > HeadDepth({1: 400.0}).choose(rates, 1, flat)


def test_features_that_make_a_step_longer_must_be_won_back_too() -> None:
    """At 0.3 a first guess wins 1.3 tokens for 1.1 steps; with 0.2 of a step for features it loses."""
    rates = [[0.3] + [0.0] * (MOST_HEAD_DEPTH - 1)]
    free, dear = HeadDepth({1: 100.0}), HeadDepth({1: 100.0}, tapped_us={1: 200.0, 4: 200.0})
    assert (free.choose(rates, 1, flat), dear.choose(rates, 1, flat)) == (1, 0)
    assert (free.gains(rates[0], 1, 1, 1, flat), dear.gains(rates[0], 1, 1, 1, flat)) == (True, False)
    assert (free.tapped_us(8), dear.tapped_us(8)) == (0.0, 200.0)


def test_a_text_is_read_where_its_gain_is_several_times_what_that_takes() -> None:
    """Guesses that are always right, at a tenth of a step each, save 1 - 1.8 / 9 of the time: 102 steps of 128.

    Reading is a forward, and so much for each position.
    """
    head, rates = HeadDepth({1: 100.0}, row_us=100.0), [[1.0] * MOST_HEAD_DEPTH]
    assert not head.worth_reading(1, 1, 1000.0), "nothing is known of it"
    head.choose(rates, 1, flat)
    assert head.worth_reading(340, 1, 1000.0)
    assert not head.worth_reading(341, 1, 1000.0)
    assert head.worth_reading(169, 2, 1000.0)
    assert not head.worth_reading(170, 2, 1000.0), "its part of what a step of two gains"
    for _ in range(60):
        head.read(10, 5000.0)
    assert not head.worth_reading(100, 1, 1000.0), "reading has become dear"


def test_what_can_be_read_in_a_time_is_what_a_reading_takes_backwards() -> None:
    head = HeadDepth({1: 100.0}, row_us=10.0)
    assert [head.readable(time_us) for time_us in (0.0, 100.0, 109.0, 110.0, 1100.0)] == [0, 0, 0, 1, 100]
    assert head.reading_us(int(head.readable(1100.0))) <= 1100.0
    assert HeadDepth({1: 100.0}).readable(1100.0) == inf, "only the forward takes time"
    assert HeadDepth({1: 100.0}).readable(100.0) == 0


def test_a_forward_of_a_draft_is_shared_by_those_that_it_drafts_for() -> None:
    head = HeadDepth({1: 60.0, 2: 100.0}, first_us={1: 150.0, 2: 200.0})
    assert head.parts([1, 1]) == [0.5, 0.5]
    assert head.parts([1, 3]) == pytest.approx([100.0 / 320.0, 220.0 / 320.0])
    assert head.parts([2, 3]) == pytest.approx([150.0 / 360.0, 210.0 / 360.0])
    assert head.parts([0, 1]) == [0.5, 0.5], "the first one reads"
    assert head.parts([5]) == [1.0]
    assert head.parts_us([1, 3]) == pytest.approx([100.0, 220.0])


def test_a_draft_is_charged_with_what_it_is_expected_to_take_on_the_machine_as_it_is_now() -> None:
    head = HeadDepth({1: 100.0}, row_us=5.0)
    assert head.charged_us(1, 2, 150.0, rows=4) == 220.0
    assert head.charged_us(1, 2, 50_000.0, rows=4) == 220.0, "a hiccup"
    assert head.charged_us(1, 2, 50_000.0, rows=4) == 50_000.0, "two in a row are none"
    head.pace = 2.0
    assert head.charged_us(1, 2, 440.0, rows=4) == 440.0
    head.observe(1, 2, 400.0, now_us=0.0)
    assert head.charged_us(1, 2, 400.0) == pytest.approx(400.0), "it is no slower than all else"


def test_features_that_nobody_drafts_by_are_dropped_at_the_second_thought_and_the_next_time_at_the_first() -> None:
    kept = FeatureRetention(thoughts=1)
    assert not kept.over(pays=False)
    kept.thoughts = 2
    assert kept.over(pays=False)
    kept.dropped(4, 0.0, due=False)
    kept.begins()
    assert not kept.over(pays=False)
    kept.thoughts = 1
    assert kept.over(pays=False)
    kept.drafted(pays=True)
    kept.thoughts = 1
    assert not kept.over(pays=False), "a draft paid in between"


def test_what_was_kept_in_vain_is_a_small_share_of_the_time_until_it_is_kept_again() -> None:
    kept = FeatureRetention(spent_us=100.0)
    kept.dropped(4, 1_000.0, due=False)
    assert not kept.again(4, 1_000.0 + 100.0 / EXPLORED_SHARE - 1)
    assert kept.again(4, 1_000.0 + 100.0 / EXPLORED_SHARE)
    assert not kept.again(3, 1_001.0)
    assert kept.again(2, 1_001.0), "half of the batch by which it was weighed has gone"
    kept.begins()
    kept.drafted(pays=True)
    kept.spent_us = 100.0
    kept.dropped(4, 50_000.0, due=True)
    assert kept.again(4, 50_001.0), "not in vain: a draft had paid"


def test_the_least_charge_of_a_draft_is_that_of_all_together_or_of_one_alone() -> None:
    depth = HeadDepth({1: 100.0, 4: 250.0})
    assert depth.least_us(1, lambda rows: 1_000.0 + 100.0 * rows) == 100.0 + 100.0
    assert depth.least_us(4, lambda rows: 1_000.0 + 100.0 * rows) == 250.0 + 4 * 100.0
    assert HeadDepth({1: 100.0, 4: 900.0}).least_us(4, lambda rows: 1_000.0 + 100.0 * rows) == 4 * (100.0 + 100.0)
