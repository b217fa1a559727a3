"""Never slower is enforced: whatever a drafter does, 256 tokens take at most 3 % longer than plain decoding.

In virtual time: a forward of m rows takes V(m), everything else nothing. The drafters answer some time after a verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from specwire.core.law.sampling import Sampling
from specwire.core.messages import AssignedDrafter
from specwire.core.text import BEFORE, Stopping
from specwire.core.verify.session import Allowance
from specwire.lm import load_model
from specwire.sim.clock import Clock, Machine
from specwire.sim.verifier import ForwardCost, SimVerifier
from tests.verify_service.rig import chain, oracle
from verify_service.engine.messages import Opening, Report

PROMPT = (7, 3, 9)
COUNT = 256
PLAIN_US = 10_000.0

# What a drafter proposes behind `done` decided tokens of `truth`, and how long after the verdict it arrives.
Drafter = Callable[[Sequence[int], int], tuple[list[int], float]]


class Played:
    """A session of a verifier, whose drafter answers each verdict. spec: of the scripted model whose text it is."""

    def __init__(self, growth: float, spec: str = "scripted:5", ngram: bool = True) -> None:
        self.truth = oracle(load_model(spec, slots=1), PROMPT, COUNT + 20)
        self.cost = ForwardCost(PLAIN_US, growth, growth)
        self.tokens: list[int] = []
        self.first_us = 0.0
        self._ngram = ngram
        self._clock = Clock()
        self._verifier = SimVerifier(self._clock, Machine(self._clock), self.cost)
        self._link = self._verifier.link(self._hear)

    def generate(self, drafter: Drafter, due: int) -> float:
        """Microseconds for COUNT tokens."""
        self._drafter = drafter
        drafters = (AssignedDrafter(0, plan=f"stream:{due},{due},{due}"),) if due else ()
        told = Sampling(), Stopping(COUNT), Allowance(0, 1 << 20)
        opening = Opening(1, "a", 1, 1, PROMPT, len(PROMPT), *told, ngram=self._ngram, drafters=drafters)
        self._verifier.open(self._link, opening, lambda position: self.truth[position - len(PROMPT)])
        self._clock.run()
        assert self.tokens == self.truth[:COUNT]
        return self._clock.now_us

    def _hear(self, report: Report) -> None:
        for decided in report.decided:
            self.first_us = self.first_us or self._clock.now_us
            self.tokens += decided.verdict.tokens
            if decided.verdict.finish is not None:
                self._clock.stop()
        tokens, delay = self._drafter(self.truth, len(self.tokens))
        if tokens:
            text = (*PROMPT, *self.tokens)
            parents = PARENTS.get(self._drafter, ())
            proposed = (1, replace(chain(len(self.tokens), text, tokens), parents=parents))
            self._clock.after(delay, partial(self._verifier.send, self._link, proposals=(proposed,)))


def silent(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    return [], 0.0


def good(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    """Three of four right."""
    tokens = list(truth[done : done + 4])
    return [*tokens[:3], (tokens[3] + 1) % 64], 2000.0


def wrong(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    return [(token + 1) % 64 for token in truth[done : done + 8]], 1000.0


def right_for_a_while(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    return list(truth[done : done + 8]) if done < 12 else [1] * 8, 1000.0


def wrong_and_wide(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    return [truth[done], *((token + 1) % 64 for token in truth[done + 1 : done + 16])], 1000.0


def late(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    return list(truth[done : done + 2]), 35_000.0


def moody(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    """Prompt while it is trusted least."""
    return list(truth[done : done + 4]), 500.0 if done // 16 % 2 else 60_000.0


def wrong_leaves(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    """A tree of wrong paths of four tokens, four beside each other."""
    return [(truth[done + depth] + 1 + path) % 64 for path in range(4) for depth in range(4)], 1000.0


def right_then_wrong_leaves(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    """One right token, and behind it three wrong paths of five."""
    return [
        truth[done],
        *((truth[done + 1 + depth] + 1 + path) % 64 for path in range(3) for depth in range(5)),
    ], 1000.0


# Of those that draft trees.
PARENTS: dict[Drafter, tuple[int, ...]] = {
    wrong_leaves: tuple(node - 1 if node % 4 else BEFORE for node in range(16)),
    right_then_wrong_leaves: (BEFORE, *(node - 1 if node % 5 != 1 else 0 for node in range(1, 16))),
}


@pytest.mark.parametrize("growth", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("due", [0, 8])
@pytest.mark.parametrize(
    "drafter",
    [silent, wrong, wrong_and_wide, right_for_a_while, late, moody, wrong_leaves, right_then_wrong_leaves],
)
def test_never_slower(drafter: Drafter, due: int, growth: float) -> None:
    assert Played(growth).generate(drafter, due) <= COUNT * PLAIN_US / 0.97


@pytest.mark.parametrize("due", [0, 8])
@pytest.mark.parametrize("growth", [0.0, 0.02, 0.05])
def test_a_tree_of_wrong_leaves_costs_no_more_than_a_wrong_chain(growth: float, due: int) -> None:
    assert Played(growth).generate(wrong_leaves, due) <= 1.001 * Played(growth).generate(wrong, due)


@pytest.mark.parametrize("growth", [0.0, 0.05])
def test_good_drafter_pays(growth: float) -> None:
    """Four tokens for a wait of 2 ms and a forward of five rows."""
    played = Played(growth)
    ideal = COUNT / 4 * (2000.0 + played.cost.at(1, 4))
    assert played.generate(good, due=4) <= 1.15 * ideal


def test_the_first_token_waits_for_no_proposal() -> None:
    """Eight draft tokens are said to be due, and none ever comes: the first forward decides all the same."""
    played = Played(0.0)
    played.generate(silent, due=8)
    assert played.first_us == PLAIN_US


@pytest.mark.parametrize("growth", [0.0, 0.02, 0.05, 0.3])
@pytest.mark.parametrize("vocab", [10, 16, 64])
def test_a_text_that_repeats_by_chance_costs_nothing(vocab: int, growth: float) -> None:
    """Of few tokens every pair has occurred before, and what followed says nothing."""
    played = Played(growth, f"scripted:5:vocab={vocab}")
    assert played.generate(silent, due=0) <= 1.01 * COUNT * PLAIN_US


@pytest.mark.parametrize("growth", [0.0, 0.05])
def test_a_text_that_repeats_pays(growth: float) -> None:
    assert Played(growth, "scripted:5:memory=1").generate(silent, due=0) <= 0.3 * COUNT * PLAIN_US


@pytest.mark.parametrize("growth", [0.0, 0.05])
def test_a_good_drafter_is_worth_more_than_chance(growth: float) -> None:
    """The verifier goes on waiting for it although something to test is always at hand."""
    alone, beside = Played(growth, "scripted:5:vocab=10", ngram=False), Played(growth, "scripted:5:vocab=10")
    assert beside.generate(good, due=4) <= 1.02 * alone.generate(good, due=4)


def one_in_seven(truth: Sequence[int], done: int) -> tuple[list[int], float]:
    """A token, right so often that it gains 14 % where rows are free."""
    return [truth[done] if done % 7 == 0 else (truth[done] + 1) % 64], 0.0


@pytest.mark.parametrize("drafter", [one_in_seven, wrong, wrong_and_wide, right_for_a_while])
def test_windows_that_were_measured_a_quarter_too_cheap_cost_no_more_than_the_ledger_allows(drafter: Drafter) -> None:
    """Any window takes a quarter longer than a plain step. At start they were measured to take no longer."""
    played = Played(0.0)
    played._verifier._cost = replace(played.cost, steps=(1.0, *[1.25] * 40))
    assert played._verifier.engine.costs.of(1)(2) == PLAIN_US
    assert played.generate(drafter, due=0) <= 1.03 * COUNT * PLAIN_US + 4 * PLAIN_US


@pytest.mark.parametrize("growth", [0.0, 0.02])
def test_that_does_not_keep_windows_that_gain_all_the_same_from_being_tested(growth: float) -> None:
    played = Played(growth)
    played._verifier._cost = replace(played.cost, steps=(1.0, *[1.25] * 40))
    assert played.generate(good, due=4) < 0.6 * COUNT * PLAIN_US
