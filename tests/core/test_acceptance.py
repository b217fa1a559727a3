"""The proofs of issue A, point 3: no proposal changes a text, and the text's law is the target's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import chisquare

from specwire.core.law.acceptance import choose, decide
from specwire.core.law.sampling import Sampling
from specwire.core.messages import Outcome
from tests.core.philox import gumbel_over_seeds

A, R, B, D = Outcome.ACCEPTED, Outcome.RECOVERED, Outcome.BONUS, Outcome.DIRECT
START = 5
HORIZON = 4
LONGEST = 3
ALPHA = 1e-3


class Target:
    """A first-order language model over a few tokens: one row of logits per previous token."""

    def __init__(self, vocabulary: int, sampling: Sampling, table_seed: int = 0) -> None:
        self.vocabulary = vocabulary
        self.sampling = sampling
        self.logits = np.random.default_rng(table_seed).normal(0.0, 1.2, (vocabulary, vocabulary))
        self.next = lru_cache(maxsize=None)(self._next)

    def _next(self, previous: int, position: int) -> int:
        return choose(self.logits[previous], position, self.sampling)

    def plain(self, previous: int, position: int, count: int) -> tuple[int, ...]:
        """Autoregressive decoding: the oracle."""
        tokens: list[int] = []
        for offset in range(count):
            previous = self.next(previous, position + offset)
            tokens.append(previous)
        return tuple(tokens)

    def rows(self, previous: int, position: int, window: tuple[int, ...]) -> list[int]:
        """What one forward over the window chooses: each row in the context of the window's tokens before it."""
        contexts = (previous, *window)
        return [self.next(context, position + index) for index, context in enumerate(contexts)]


def proposals(vocabulary: int) -> Iterator[tuple[tuple[int, ...], int | None]]:
    """Every window of up to LONGEST tokens with every late token behind it, and none."""
    for length in range(LONGEST + 1):
        for window in product(range(vocabulary), repeat=length):
            for late in (None, *range(vocabulary)):
                yield window, late


@pytest.mark.parametrize("vocabulary", [3, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_proposal_changes_a_token(vocabulary: int, temperature: float) -> None:
    """Every window and late token at every position of the text: by induction any sequence of rounds decides it."""
    for seed in range(6):
        target = Target(vocabulary, Sampling(temperature, seed=seed), table_seed=seed)
        text = (0, *target.plain(0, START, HORIZON + LONGEST + 1))
        for done in range(HORIZON):
            truth = text[done + 1 :]
            for window, late in proposals(vocabulary):
                decision = decide(target.rows(text[done], START + done, window), window, late)
                assert decision.tokens == truth[: len(decision.tokens)]
                assert len(decision.tokens) == len(decision.outcomes) >= 1
                agreed = next((i for i, t in enumerate(window) if t != truth[i]), len(window))
                assert len(decision.tokens) == agreed + 1


@pytest.mark.parametrize(
    ("chosen", "window", "late", "tokens", "outcomes"),
    [
        ([0], (), None, (0,), (D,)),
        ([0], (), 0, (0,), (A,)),
        ([0], (), 1, (0,), (R,)),
        ([1], (), 0, (1,), (R,)),
        ([0, 0], (0,), None, (0, 0), (A, B)),
        ([0, 0], (0,), 0, (0, 0), (A, A)),
        ([0, 5], (0,), 0, (0, 5), (A, R)),
        ([0, 5], (1,), None, (0,), (R,)),
        ([0, 5], (1,), 5, (0,), (R,)),
        ([7, 8, 9], (7, 8), None, (7, 8, 9), (A, A, B)),
        ([7, 8, 9], (7, 0), 9, (7, 8), (A, R)),
        ([7, 8, 9], (0, 8), 9, (7,), (R,)),
        ([7], (0, 8), 9, (7,), (R,)),
    ],
)
def test_outcomes_by_hand(
    chosen: list[int],
    window: tuple[int, ...],
    late: int | None,
    tokens: tuple[int, ...],
    outcomes: tuple[Outcome, ...],
) -> None:
    """Token 0 is an ordinary token, also when it comes late; the recovered token is that of the refused row."""
    decision = decide(chosen, window, late)
    assert (decision.tokens, decision.outcomes) == (tokens, outcomes)
    assert decision.accepted == outcomes.count(A)


def test_clipping_keeps_tokens_and_outcomes_together() -> None:
    clipped = decide([7, 8, 9], (7, 8)).clipped(2)
    assert (clipped.tokens, clipped.outcomes) == ((7, 8), (A, A))


@pytest.mark.parametrize(("chosen", "window"), [([], ()), ([], (1,)), ([1], (1,)), ([1, 2, 3], (1,))])
def test_a_wrong_number_of_rows_is_an_error(chosen: list[int], window: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="one more than the window"):
        decide(chosen, window)


def test_ties_go_to_the_lowest_id() -> None:
    assert choose([1.0, 3.0, 3.0, 3.0], 0, Sampling(0.0)) == 1
    assert choose([0.0, 0.0], 0, Sampling(0.0)) == 0


def test_ties_of_coupled_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specwire.core.law.acceptance.gumbel", lambda seed, choice, position, ids: np.zeros(len(ids)))
    assert choose([1.0, 3.0, 3.0], 0, Sampling(1.0)) == 1


def test_removed_tokens_are_never_chosen() -> None:
    chosen = {choose([2.0, 1.9, 1.8, 1.7], p, Sampling(1.0, top_k=2, seed=p)) for p in range(200)}
    assert chosen == {0, 1}


def test_choice_seed_and_position_each_change_the_draw() -> None:
    logits = np.zeros(64)
    base = Sampling(1.0, seed=1)
    draws = [
        [choose(logits, p, sampling) for p in range(20)]
        for sampling in (base, Sampling(1.0, seed=2), Sampling(1.0, seed=1, choice=1))
    ]
    assert len({tuple(draw) for draw in draws}) == 3
    assert len(set(draws[0])) > 10


# The law, over 100,000 seeds

SEEDS = np.random.default_rng(2024).integers(0, 2**64, 100_000, dtype=np.uint64)
FIRST = np.log([0.5, 0.3, 0.15, 0.05])
SECOND = np.log([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25], [0.05, 0.05, 0.6, 0.3]])
Rows = npt.NDArray[np.float64]


def choose_over_seeds(log_p: Rows, position: int) -> npt.NDArray[np.int64]:
    """`choose` for all SEEDS at temperature 1; log_p is (vocabulary,) or (seeds, vocabulary)."""
    noise = gumbel_over_seeds(SEEDS, position, log_p.shape[-1])
    chosen: npt.NDArray[np.int64] = np.argmax(log_p + noise, axis=-1)
    return chosen


def test_the_vectorised_draw_is_the_core_s() -> None:
    first = choose_over_seeds(FIRST, START)
    for index in range(300):
        assert choose(FIRST, START, Sampling(1.0, seed=int(SEEDS[index]))) == first[index]


@pytest.mark.parametrize("position", [0, 1, START, 2**31])
def test_one_position_follows_the_target(position: int) -> None:
    counts = np.bincount(choose_over_seeds(FIRST, position), minlength=4)
    assert chisquare(counts, np.exp(FIRST) * len(SEEDS)).pvalue > ALPHA


def test_two_successive_positions_follow_the_target_jointly() -> None:
    first = choose_over_seeds(FIRST, START)
    second = choose_over_seeds(SECOND[first], START + 1)
    counts = np.bincount(first * 4 + second, minlength=16)
    expected = (np.exp(FIRST)[:, None] * np.exp(SECOND)).ravel() * len(SEEDS)
    assert chisquare(counts, expected).pvalue > ALPHA


@pytest.mark.parametrize("guess", range(4))
def test_the_law_holds_given_any_proposal(guess: int) -> None:
    """Whether the second token comes from the guess's row of the same forward or, refused, from one of its own."""
    first = choose_over_seeds(FIRST, START)
    behind_guess = choose_over_seeds(np.broadcast_to(SECOND[guess], (len(SEEDS), 4)), START + 1)
    own_forward = choose_over_seeds(SECOND[first], START + 1)
    second = np.where(first == guess, behind_guess, own_forward)
    expected = (np.exp(FIRST)[:, None] * np.exp(SECOND)).ravel() * len(SEEDS)
    assert chisquare(np.bincount(first * 4 + second, minlength=16), expected).pvalue > ALPHA


def test_filters_keep_the_law_of_the_filtered_target() -> None:
    """The core itself, with temperature, top_k and top_p, over 4,000 seeds."""
    sampling = [Sampling(0.7, top_k=3, top_p=0.95, seed=int(seed)) for seed in SEEDS[:4000]]
    counts = np.bincount([choose(FIRST, START, s) for s in sampling], minlength=4)
    weights = np.array([0.5, 0.3, 0.15, 0.0]) ** (1 / 0.7)
    assert counts[3] == 0
    assert chisquare(counts[:3], weights[:3] / weights.sum() * 4000).pvalue > ALPHA


def test_a_drafter_with_the_same_noise_agrees_more_often_than_an_independent_one() -> None:
    """The point of the coupling: P(agree) >= (1 - TV) / (1 + TV) (arXiv 2408.07978), here TV = 0.2."""
    draft = np.log([0.3, 0.5, 0.15, 0.05])
    agree = float(np.mean(choose_over_seeds(FIRST, START) == choose_over_seeds(draft, START)))
    assert (1 - 0.2) / (1 + 0.2) - 0.01 <= agree <= 1 - 0.2 + 0.01
