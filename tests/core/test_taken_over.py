"""The law of a text whose verifier was lost is the target's under `rejection` and `block`, whenever that was.

The core's own sessions run in every world that there is (tests/core/laws.py): a verifier decides, its latest verdicts
are lost with it, a successor opens from what is durable, in another epoch. The drafter has heard of what was lost, and
what it does next may depend on it: here, whether its next chain is there in time. That the proof can fail is shown by
successors that use again what the lost one has used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise

import pytest

from specwire.core.draft import DraftSession
from specwire.core.law.acceptance import by_block, by_rejection
from specwire.core.law.sampling import Sampling, with_rule
from specwire.core.messages import Decision, DraftToken, Number, Pace, Proposal, Verdict, Weights
from specwire.core.text import Ending
from specwire.core.verify.chains import Offer
from specwire.core.verify.session import Allowance, VerifySession
from tests.core.laws import Explorer, Row, Rows, Text, World, plain

F = Fraction
# By the token before. Behind a 1 the drafter knows one token only.
TARGET = ((F(3, 4), F(1, 4)), (F(1, 3), F(2, 3)))
DRAFTER = ((F(1, 4), F(3, 4)), (F(1), F(0)))
NEWER = ((F(2, 3), F(1, 3)), (F(1, 4), F(3, 4)))
PROMPT = (0,)
LENGTH = 3
END = len(PROMPT) + LENGTH
RULES: dict[str, Callable[[Rows, Sequence[DraftToken], DraftToken | None], Decision]] = {
    "rejection": by_rejection,
    "block": by_block,
}
# What a step finds: chunks that have come, and whether one more comes during its forward.
Step = tuple[int, bool]
# By the chunk's length, the lost verifier's steps.
BEFORE: dict[int, tuple[tuple[Step, ...], ...]] = {
    1: (((2, False),), ((0, True),), ((1, True),), ((1, False), (1, False))),
    2: (((1, False),), ((0, True), (1, False))),
}


def p(text: Text) -> Row:
    return TARGET[text[-1]]


def q(text: Text) -> Row:
    return DRAFTER[text[-1]]


def another(text: Text) -> Row:
    return NEWER[text[-1]]


PLAIN = plain(lambda output: p((*PROMPT, *output)), 2, LENGTH)


@dataclass
class Numbers:
    """Numbers between 0 and 1, one for each place; of each only so much is known as has been asked."""

    explorer: Explorer
    _known: dict[object, tuple[Fraction, Fraction]] = field(default_factory=dict)

    def choose(self, place: object, weights: Sequence[Number]) -> int:
        """By inversion: an index, with a probability in proportion to its weight where nothing is known."""
        total = F(sum(weights))
        low, high = self._known.get(place, (F(0), F(1)))
        edges = [F(0), *accumulate(F(weight) / total for weight in weights)]
        parts = [(max(low, start), min(high, stop)) for start, stop in pairwise(edges)]
        index = self.explorer.choose([max(stop - start, F(0)) for start, stop in parts])
        self._known[place] = parts[index]
        return index


@dataclass
class Epoch:
    """The randomness of one connection generation: of draws, and of coins and residuals."""

    number: int
    world: World
    numbers: Numbers

    @classmethod
    def fresh(cls, number: int, explorer: Explorer) -> Epoch:
        return cls(number, World(explorer, p, q), Numbers(explorer))


class NumberedRows(Rows):
    """Rows whose coins and residuals belong to places, as the product's do (`specwire.core.law.noise`)."""

    def __init__(self, epoch: Epoch, text: Text, window: Text) -> None:
        super().__init__(epoch.world, text, window, END)
        self._numbers = epoch.numbers

    def coin(self, row: int, chance: Number) -> bool:
        return self._numbers.choose(("accept", self._texts[row]), [chance, 1 - chance]) == 0

    def residual(self, row: int, scale: Number, weights: Weights) -> int:
        shares = p(self._texts[row])
        rest = [max(scale * shares[token] - F(weights.of(token), weights.total), 0) for token in range(len(shares))]
        return self._numbers.choose(("rest", self._texts[row]), rest)


@dataclass(frozen=True)
class Case:
    """before: the lost verifier's steps. kept: of their verdicts, those that are durable. chunk: of the drafter's pace.

    in_time: of the drafter's next chain, how many chunks the successor's first step finds, given the lost verdicts.
    """

    before: tuple[Step, ...]
    kept: int
    chunk: int
    in_time: Callable[[Sequence[Verdict]], int]

    @property
    def pace(self) -> Pace:
        return Pace(self.chunk, LENGTH)


class Deployment:
    """A drafter and, one after the other, two verifiers of one session."""

    def __init__(self, rule: str, case: Case, epoch: Epoch) -> None:
        self.rule = rule
        self.case = case
        self.drafter = DraftSession(PROMPT, case.pace, weighed=True, epoch=epoch.number)
        self.sent: list[Proposal] = []
        self.epoch = epoch
        self.verifier = self.opened(PROMPT)

    def opened(self, text: Text) -> VerifySession:
        sampling, ending = with_rule(Sampling(1.0), self.rule), Ending(END, frozenset(), frozenset())
        allowance = Allowance(len(text), END)
        return VerifySession.opened(text, len(PROMPT), sampling, ending, allowance, 2, epoch=self.epoch.number)

    def step(self, arrived: int, late: bool) -> Verdict:
        for _ in range(arrived):
            self.propose()
        window = self.verifier.drafts(LENGTH)
        if late:
            self.propose()
        tokens = tuple(draft.token for draft in window)
        rows = NumberedRows(self.epoch, tuple(self.verifier.text.tokens), tokens)

        def judge(width: int, behind: DraftToken | None) -> Decision:
            return RULES[self.rule](rows, window[:width], behind)

        verdict = self.verifier.resolve([0] * (len(window) + 1), tokens, judge=judge)
        self.drafter.advance(verdict.position, verdict.tokens, self.case.pace, self.epoch.number)
        return verdict

    def propose(self) -> None:
        """The drafter's next chunk, if it may draft one, is offered."""
        drafter = self.drafter
        while (proposal := drafter.take_proposal()) is None and drafter.wants_token:
            text = tuple(drafter.line)
            drafter.drafted(self.epoch.world.draft(text), self.epoch.world.weights(text))
        if proposal is not None:
            self.sent.append(replace(proposal, source=1))
            self.verifier.offer(self.sent[-1])

    def finish(self, first: int) -> Text:
        """The successor's steps: `first` chunks are there for the first one, and one more comes in the next."""
        arrived = first
        while self.verifier.room:
            self.step(arrived, late=False)
            arrived = 1
        return tuple(self.verifier.text.tokens[len(PROMPT) :])


Successor = Callable[[Deployment, Text, Explorer], None]


def as_it_is(deployment: Deployment, durable: Text, explorer: Explorer) -> None:
    """It opens in another epoch. What was proposed in the lost one comes again, and is dropped."""
    deployment.epoch = Epoch.fresh(2, explorer)
    deployment.verifier = deployment.opened(durable)
    deployment.drafter.advance(len(durable), (), deployment.case.pace, 2)
    offers = {deployment.verifier.offer(proposal) for proposal in deployment.sent}
    assert offers <= {Offer.OTHER_EPOCH}


def with_another_version(deployment: Deployment, durable: Text, explorer: Explorer) -> None:
    """Nothing is lost: the same verifier goes on, in another epoch, and a drafter of other weights opens."""
    deployment.epoch = Epoch(2, World(explorer, p, another), Numbers(explorer))
    tail = deployment.verifier.resume(durable, Allowance(len(durable), END), epoch=2)
    assert tail is not None
    deployment.drafter = DraftSession(durable, deployment.case.pace, weighed=True, epoch=2)
    for verdict in tail:
        deployment.drafter.advance(verdict.position, verdict.tokens, deployment.case.pace, 2)
    assert {deployment.verifier.offer(proposal) for proposal in deployment.sent} <= {Offer.OTHER_EPOCH}


def with_the_old_coins(deployment: Deployment, durable: Text, explorer: Explorer) -> None:
    """Coins keyed without the epoch, and another chain."""
    numbers = deployment.epoch.numbers
    as_it_is(deployment, durable, explorer)
    deployment.epoch.numbers = numbers


def with_the_old_chain(deployment: Deployment, durable: Text, explorer: Explorer) -> None:
    """Fresh coins and draws, and the drafts of before: proposals of the lost epoch are as good as new ones."""
    drafts = deployment.epoch.world._drafts
    as_it_is(deployment, durable, explorer)
    deployment.epoch.world = World(explorer, p, q, independent=True, _drafts=drafts)


def run(explorer: Explorer, rule: str, case: Case, successor: Successor) -> Text:
    """The text in one world."""
    deployment = Deployment(rule, case, Epoch.fresh(1, explorer))
    verdicts = [deployment.step(*step) for step in case.before if deployment.verifier.room]
    lost = verdicts[case.kept :]
    durable = tuple(deployment.verifier.text.tokens[: lost[0].position] if lost else deployment.verifier.text.tokens)
    successor(deployment, durable, explorer)
    return deployment.finish(case.in_time(lost))


def law(rule: str, case: Case, successor: Successor) -> dict[Text, Fraction]:
    explorer = Explorer()
    texts: dict[Text, Fraction] = {}
    while True:
        text = run(explorer, rule, case, successor)
        texts[text] = texts.get(text, F(0)) + explorer.probability
        if not explorer.next():
            return texts


def accepted(lost: Sequence[Verdict]) -> int:
    return sum(verdict.accepted for verdict in lost)


def never(_: Sequence[Verdict]) -> int:
    return 0


def always(_: Sequence[Verdict]) -> int:
    return 1


def after_a_refusal(lost: Sequence[Verdict]) -> int:
    """The drafter has begun anew there, and goes on from where it has."""
    return 2 if accepted(lost) == 0 else 0


def after_an_acceptance(lost: Sequence[Verdict]) -> int:
    return 1 if accepted(lost) else 0


ARRIVALS = (never, always, after_a_refusal, after_an_acceptance)


@pytest.mark.parametrize("in_time", ARRIVALS)
@pytest.mark.parametrize("chunk", BEFORE)
@pytest.mark.parametrize("rule", RULES)
def test_the_law_is_the_target_s_whenever_a_verifier_is_lost(
    rule: str, chunk: int, in_time: Callable[[Sequence[Verdict]], int]
) -> None:
    """For each way in which the lost one's steps fell out, and each point at which it was lost."""
    for before in BEFORE[chunk]:
        for kept in range(len(before)):
            case = Case(before, kept, chunk, in_time)
            assert law(rule, case, as_it_is) == PLAIN, case


@pytest.mark.parametrize("in_time", ARRIVALS)
@pytest.mark.parametrize("chunk", BEFORE)
@pytest.mark.parametrize("rule", RULES)
def test_the_law_is_the_target_s_whenever_a_drafter_takes_another_version(
    rule: str, chunk: int, in_time: Callable[[Sequence[Verdict]], int]
) -> None:
    """Whatever of the verdicts is durable by then: what was decided stands."""
    for before in BEFORE[chunk]:
        for kept in range(len(before) + 1):
            case = Case(before, kept, chunk, in_time)
            assert law(rule, case, with_another_version) == PLAIN, case


@pytest.mark.parametrize("successor", [with_the_old_coins, with_the_old_chain])
@pytest.mark.parametrize("rule", RULES)
def test_what_the_lost_one_has_used_must_not_be_used_again(rule: str, successor: Successor) -> None:
    """Where what was lost has a say in what is tested now. Else it would do no harm, and nobody would notice."""
    found = partial(law, rule, successor=successor)
    assert found(Case(((1, False),), 0, 1, after_a_refusal)) != PLAIN
    assert found(Case(((1, False),), 0, 1, never)) == PLAIN
