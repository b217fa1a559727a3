"""Rejection and block verification decide by the target's law, exactly, whatever arrives when.

Proved by running the core's own decisions in every world that there is (tests/core/laws.py). That the proof can fail is
shown by drafters and verifiers that break one condition of PROTOCOL.md section 7 each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import product

import pytest

from specwire.core.law.acceptance import by_block, by_rejection, judge
from specwire.core.law.acceptance import decide as by_equality
from specwire.core.law.sampling import Acceptance
from specwire.core.messages import Decision, DraftToken, Number, Outcome, Weights
from tests.core.laws import (
    BEGINNING,
    Explorer,
    Row,
    Rows,
    State,
    Table,
    Text,
    World,
    after,
    joint,
    law,
    of_texts,
    plain,
)

F = Fraction
A, R, B, D = Outcome.ACCEPTED, Outcome.RECOVERED, Outcome.BONUS, Outcome.DIRECT
LENGTH = 3
# By position modulo 2, then by the token before; the drafter lacks ids, as one does that keeps the most probable ones.
TARGET = (
    ((F(1, 2), F(1, 3), F(1, 6)), (F(1, 6), F(1, 6), F(2, 3)), (F(1, 4), F(3, 4), F(0))),
    ((F(1, 5), F(3, 5), F(1, 5)), (F(1, 2), F(0), F(1, 2)), (F(1, 3), F(1, 3), F(1, 3))),
)
DRAFTER = (
    ((F(3, 4), F(1, 4), F(0)), (F(1, 2), F(0), F(1, 2)), (F(0), F(1), F(0))),
    ((F(1, 8), F(3, 8), F(1, 2)), (F(2, 3), F(1, 3), F(0)), (F(1, 2), F(0), F(1, 2))),
)
# Four ids, whatever stands before.
TARGET_OF_4 = (F(1, 10), F(4, 10), F(2, 10), F(3, 10))
DRAFTER_OF_4 = (F(1, 2), F(1, 8), F(0), F(3, 8))
SURE = F(1, 2)

Rule = Callable[[Rows, Sequence[DraftToken], DraftToken | None], Decision]
Pattern = tuple[tuple[int, bool], ...]
RULES: dict[str, Rule] = {"rejection": by_rejection, "block": by_block}


def p(text: Text) -> Row:
    return TARGET[len(text) % 2][text[-1] if text else 0]


def q(text: Text) -> Row:
    return DRAFTER[len(text) % 2][text[-1] if text else 0]


def p4(text: Text) -> Row:
    return TARGET_OF_4


def q4(text: Text) -> Row:
    return DRAFTER_OF_4


PLAIN = plain(p, 3, LENGTH)
PLAIN_OF_4 = plain(p4, 4, LENGTH)


def of(world: World, text: Text) -> DraftToken:
    """What the drafter guesses behind `text`."""
    return DraftToken(world.draft(text), world.weights(text))


def chain(world: World, text: Text, length: int) -> tuple[DraftToken, ...]:
    drafts: list[DraftToken] = []
    for _ in range(length):
        drafts.append(of(world, text))
        text = (*text, drafts[-1].token)
    return tuple(drafts)


def decide(
    world: World, rule: Rule, text: Text, window: Sequence[DraftToken], late: DraftToken | None, end: int
) -> Text:
    """The text behind one forward; what lies beyond `end` is cut, as a text's end is."""
    rows = Rows(world, text, tuple(draft.token for draft in window), end)
    return (*text, *rule(rows, window, late).tokens)[:end]


def step(world: World, rule: Rule, text: Text, width: int, late: bool, end: int = LENGTH) -> Text:
    """One forward: `width` draft tokens are at hand, and one more comes meanwhile if `late`."""
    room = end - len(text)
    at_hand = chain(world, text, min(width + late, room))
    window = at_hand[: min(width, room)]
    return decide(world, rule, text, window, at_hand[-1] if len(at_hand) > len(window) else None, end)


def streamed(world: World, rule: Rule, pattern: Pattern, end: int = LENGTH) -> Text:
    """The text that a stream of proposals ends in; `pattern`: what each step finds."""
    text: Text = ()
    for width, late in pattern:
        if len(text) < end:
            text = step(world, rule, text, width, late, end)
    return text


def arrivals(most: int) -> list[tuple[int, bool]]:
    return [(width, late) for width in range(most + 1) for late in (False, True) if width + late <= most]


# What each of three steps may find: every step decides a token, so each has room for one fewer.
ARRIVALS = (arrivals(3), arrivals(2), arrivals(1))
PATTERNS = list(product(*ARRIVALS))


def sharing(explorer: Explorer, target: Table = p, drafter: Table = q) -> World:
    return World(explorer, target, drafter)


# The proofs


def by_coupling(rows: Rows, window: Sequence[DraftToken], late: DraftToken | None) -> Decision:
    """Of the target's own tokens none is looked at behind one that the window does not have: zeros stand there."""
    tokens = [draft.token for draft in window]
    chosen = [rows.own(0)]
    while len(chosen) <= len(window) and chosen[-1] == tokens[len(chosen) - 1]:
        chosen.append(rows.own(len(chosen)))
    chosen += [0] * (len(window) + 1 - len(chosen))
    return by_equality(chosen, tokens, None if late is None else late.token)


def every_law(
    rule: Rule, world: Callable[[Explorer], World], end: int = LENGTH
) -> Iterator[tuple[Pattern, Mapping[Text, Fraction]]]:
    """The law of the text for each pattern of arrivals. Patterns that begin alike are gone through together."""

    def grown(states: Mapping[State, Fraction], pattern: Pattern) -> Iterator[tuple[Pattern, Mapping[Text, Fraction]]]:
        if len(pattern) == len(ARRIVALS):
            yield pattern, of_texts(states)
            return
        for width, late in ARRIVALS[len(pattern)]:

            def one(here: World, text: Text, width: int = width, late: bool = late) -> Text:
                return step(here, rule, text, width, late, end) if len(text) < end else text

            yield from grown(after(states, one, world), (*pattern, (width, late)))

    return grown(BEGINNING, ())


@pytest.mark.parametrize("rule", RULES)
def test_the_law_is_the_target_s_whatever_arrives_when(rule: str) -> None:
    """Windows of up to 3, late tokens or none, chains that survive direct draws and chains that begin anew."""
    found = dict(every_law(RULES[rule], sharing))
    assert list(found) == PATTERNS
    assert [pattern for pattern, texts in found.items() if texts != PLAIN] == []


@pytest.mark.parametrize("rule", [*RULES, "coupled"])
def test_likewise_with_four_ids(rule: str) -> None:
    """Coupled draws have the noise of their position, whatever stands before it."""
    shared = partial(World, p=p4, q=q4, key=len) if rule == "coupled" else partial(World, p=p4, q=q4)
    found = dict(every_law({**RULES, "coupled": by_coupling}[rule], shared))
    assert list(found) == PATTERNS
    assert [pattern for pattern, texts in found.items() if texts != PLAIN_OF_4] == []


@pytest.mark.parametrize("rule", RULES)
def test_going_on_from_states_finds_what_whole_worlds_do(rule: str) -> None:
    """Also where the law is not the target's: with noise by position alone, under `block`."""

    def by_position(explorer: Explorer) -> World:
        return World(explorer, p4, q4, key=len)

    for pattern in (PATTERNS[0], PATTERNS[20], PATTERNS[-1]):
        whole = law(partial(streamed, rule=RULES[rule], pattern=pattern), by_position)
        states = dict(BEGINNING)
        for width, late in pattern:
            states = after(states, partial(gone_on, rule=RULES[rule], width=width, late=late), by_position)
        assert of_texts(states) == whole, pattern


def gone_on(world: World, text: Text, rule: Rule, width: int, late: bool) -> Text:
    return step(world, rule, text, width, late) if len(text) < LENGTH else text


def test_the_shared_noise_has_the_law_that_the_proofs_take_it_to_have() -> None:
    """Its margins are p and q, and the two draws agree as often as the coupling's bounds say (arXiv 2408.07978)."""
    for target, drafter in ((p(()), q(())), (p((1,)), q((1,))), (p4(()), q4(()))):
        table = joint(target, drafter)
        assert tuple(map(sum, table)) == target
        assert tuple(map(sum, zip(*table, strict=True))) == drafter
        distance = sum(max(a - b, F(0)) for a, b in zip(target, drafter, strict=True))
        agreement = sum(table[token][token] for token in range(len(target)))
        assert (1 - distance) / (1 + distance) <= agreement <= 1 - distance


def test_rejection_accepts_as_often_as_can_be_and_a_block_no_less() -> None:
    """1 - TV for one token; block verification accepts more of a longer window: the reason that it exists."""

    def accepted(rule: Rule, width: int) -> Fraction:
        explorer, total = Explorer(), F(0)
        while True:
            world = World(explorer, p4, q4)
            window = chain(world, (), width)
            decision = rule(Rows(world, (), tuple(d.token for d in window), width), window, None)
            total += decision.accepted * explorer.probability
            if not explorer.next():
                return total

    overlap = sum(map(min, TARGET_OF_4, DRAFTER_OF_4))
    assert accepted(by_rejection, 1) == accepted(by_block, 1) == overlap
    assert accepted(by_rejection, 2) == overlap + overlap**2
    assert accepted(by_block, 2) > accepted(by_rejection, 2)


# What a lost verifier had decided


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fresh", [True, False])
def test_a_lost_decision_is_made_again_with_fresh_numbers(rule: str, fresh: bool) -> None:
    """What was lost has shown in what the drafter did: here it is back in time only where its token had been refused.

    With the numbers of the lost decision the law would be another one.
    """

    def run(world: World) -> Text:
        rows = _Remembered(world)
        lost = RULES[rule](rows, (of(world, ()),), None)
        again = World(world.explorer, p, q) if fresh else world
        window = (of(again, ()),) if lost.accepted == 0 else ()
        return RULES[rule](_Remembered(again) if fresh else rows, window, None).tokens[:1]

    assert (law(run, sharing) == plain(p, 3, 1)) is fresh


class _Remembered(Rows):
    """Rows whose coins and residuals fall as they fell before."""

    def __init__(self, world: World) -> None:
        super().__init__(world, (), (world.draft(()),), 1)
        self._coins: dict[int, bool] = {}
        self._rest: dict[int, int] = {}

    def coin(self, row: int, chance: Number) -> bool:
        if row not in self._coins:
            self._coins[row] = super().coin(row, chance)
        return self._coins[row]

    def residual(self, row: int, scale: Number, weights: Weights) -> int:
        if row not in self._rest:
            self._rest[row] = super().residual(row, scale, weights)
        return self._rest[row]


@pytest.mark.parametrize("rule", RULES)
def test_noise_by_position_alone_would_do_for_rejection_and_not_for_blocks(rule: str) -> None:
    """A block that is refused tells something of its later tokens, and so of the noise at their positions."""

    def by_position(explorer: Explorer) -> World:
        return World(explorer, p4, q4, key=len)

    found = law(partial(streamed, rule=RULES[rule], pattern=((3, False), (0, False), (0, False))), by_position)
    assert (found == plain(p4, 4, LENGTH)) is (rule == "rejection")


# Biased on purpose


def flushing(world: World) -> Text:
    """A token that the drafter is not sure of is sent at once, and so is tested; another one comes too late."""
    guess = of(world, ())
    sure = world.q(())[guess.token] >= SURE
    return decide(world, by_rejection, (), () if sure else (guess,), None, 1)


def stopping(world: World) -> Text:
    """The chain ends before a token that the drafter is not sure of."""
    guess = of(world, ())
    sure = world.q(())[guess.token] >= SURE
    return decide(world, by_rejection, (), (guess,) if sure else (), None, 1)


def hedging(world: World) -> Text:
    """Of two drafters' chains, the one that gets further."""
    other = World(world.explorer, world.p, world.q)
    texts = [
        by_rejection(Rows(each, (), (guess.token,), 1), (guess,), None)
        for each, guess in ((world, of(world, ())), (other, of(other, ())))
    ]
    return max(texts, key=lambda decision: decision.accepted).tokens[:1]


def restarting(world: World) -> Text:
    """A chain that begins with a token that the drafter is not sure of is drawn again."""
    guess = of(world, ())
    if world.q(())[guess.token] < SURE:
        guess = of(World(world.explorer, world.p, world.q), ())
    return decide(world, by_rejection, (), (guess,), None, 1)


@pytest.mark.parametrize("biased", [flushing, stopping, hedging, restarting])
@pytest.mark.parametrize("independent", [False, True])
def test_each_condition_is_needed(biased: Callable[[World], Text], independent: bool) -> None:
    """The proof refuses each of them, also where drafter and target share no noise."""
    found = law(biased, partial(World, p=p4, q=q4, independent=independent))
    assert sum(found.values()) == 1
    assert found != plain(p4, 4, 1)


def test_the_counterexample_of_the_architecture() -> None:
    found = law(
        flushing, lambda explorer: World(explorer, lambda _: (F(1, 2),) * 2, lambda _: (F(9, 10), F(1, 10)), True)
    )
    assert found[(1,)] == F(11, 20)


# By hand


class Told:
    """A target that answers what it is told to: one p for all rows, coins and draws in order."""

    def __init__(self, p: Sequence[Number], coins: Sequence[bool] = (), own: int = 0, rest: int = 9) -> None:
        self._p, self._coins, self._own, self._rest = p, list(coins), own, rest

    def probabilities(self, row: int, ids: Sequence[int]) -> Sequence[Number]:
        return [self._p[token] for token in ids]

    def entropy(self, row: int) -> float:
        return 1.0

    def coin(self, row: int, chance: Number) -> bool:
        return self._coins.pop(0)

    def own(self, row: int) -> int:
        return self._own

    def residual(self, row: int, scale: Number, weights: Weights) -> int:
        return self._rest


W = Weights((0, 1), (1, 1))
REJECTION, BLOCK = Acceptance.parse("rejection"), Acceptance.parse("block")


@pytest.mark.parametrize(
    ("acceptance", "coins", "width", "late", "tokens", "outcomes"),
    [
        (REJECTION, [], 0, None, (0,), (D,)),
        (REJECTION, [True], 0, 1, (1,), (A,)),
        (REJECTION, [False], 0, 1, (9,), (R,)),
        (REJECTION, [True, True], 2, None, (1, 1, 0), (A, A, B)),
        (REJECTION, [True, False], 2, 1, (1, 9), (A, R)),
        (REJECTION, [True, True, False], 2, 1, (1, 1, 9), (A, A, R)),
        (BLOCK, [], 0, None, (0,), (D,)),
        (BLOCK, [False], 0, 1, (9,), (R,)),
        (BLOCK, [False, True], 2, None, (1, 1, 0), (A, A, B)),
        (BLOCK, [True, False], 2, 1, (1, 9), (A, R)),
        (BLOCK, [False, False], 2, 1, (9,), (R,)),
        (BLOCK, [False, True, True], 2, 1, (1, 1, 1), (A, A, A)),
    ],
)
def test_outcomes_by_hand(
    acceptance: Acceptance, coins: list[bool], width: int, late: int | None, tokens: Text, outcomes: tuple[Outcome, ...]
) -> None:
    """A block goes as far as its last coin that came up, whatever those before it did."""
    window = [DraftToken(1, W)] * width
    decision = judge(acceptance, Told((0.5, 0.5), coins), window, None if late is None else DraftToken(late, W))
    assert (decision.tokens, decision.outcomes) == (tokens, outcomes)


@pytest.mark.parametrize(
    ("name", "token", "accepted"),
    [
        ("threshold(0.3)", 2, True),
        ("threshold(0.31)", 2, False),
        ("threshold(0.9)", 0, True),
        ("typical(0.3,0.09)", 1, True),
        ("typical(0.05,1.0)", 1, True),
        ("typical(0.3,0.9)", 2, False),
    ],
)
def test_lossy_rules_accept_what_is_likely_enough_and_the_target_s_own_token(
    name: str, token: int, accepted: bool
) -> None:
    """Where p = (0.6, 0.1, 0.3), entropy 1, the target's own token is 0: exp(-1) = 0.37."""
    decision = judge(Acceptance.parse(name), Told((0.6, 0.1, 0.3)), [DraftToken(token)])
    assert decision.tokens == ((token, 0) if accepted else (0,))
    assert decision.outcomes == ((A, B) if accepted else (R,))


def test_a_token_without_weights_is_no_token_to_weigh() -> None:
    with pytest.raises(AssertionError, match="no weights"):
        by_rejection(Told((0.5, 0.5)), [DraftToken(1)])
