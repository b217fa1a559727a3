"""`choose` in torch decides what the numpy reference decides; the noise has the same integers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from specwire.core.law import acceptance
from specwire.core.law import noise as reference
from specwire.core.law.acceptance import RowSampling, decide
from specwire.core.law.noise import Key
from specwire.core.law.sampling import Acceptance, History, LogprobsOf, Sampling, report, rounded
from specwire.core.law.sampling import log_probabilities as reference_log_p
from specwire.core.messages import DraftToken
from specwire.lm.law import sampler
from specwire.lm.law.logits import log_probabilities, logprobs
from specwire.lm.law.sampler import LOUD, QUIET, LogitsSampler, choose, gumbel, loudest, uniform_integers

KEYS = [Key(0, 0, 0), Key((1 << 64) - 1, (1 << 32) - 1, 4095), Key(0x0123456789ABCDEF, 7, 31), Key(1 << 63, 1, 1)]


def test_integers_and_noise_are_those_of_the_reference() -> None:
    ids = np.array([0, 1, 2, 77, 4095, 151_935, (1 << 31) - 1])
    named = torch.from_numpy(ids).unsqueeze(0)
    for integers, noise, key in zip(uniform_integers(KEYS, named), gumbel(KEYS, named), KEYS, strict=True):
        assert integers.tolist() == reference.uniform_integers(*key, ids).tolist()
        np.testing.assert_allclose(noise.numpy(), reference.gumbel(*key, ids), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("vocabulary", [50, 16_385])
def test_the_loudest_id_is_found_whatever_the_scores_are_like(vocabulary: int) -> None:
    """Flat, where all ids may win; peaked, where one does; tied; masked but for a few, and whole."""
    source = np.random.default_rng(vocabulary)
    for position in range(40):
        scores = source.normal(size=vocabulary) * source.choice([0.0, 0.1, 3.0, 40.0])
        if position % 3 == 1:
            scores = np.round(scores)
        if position % 5 == 1:
            scores[source.random(vocabulary) < 0.99] = -np.inf
        key, before = Key(int(source.integers(1 << 63)), position % 2, position), scores.copy()
        noise = reference.gumbel(*key, np.arange(vocabulary))
        assert loudest(key, scores) == (scores + noise).argmax()
        np.testing.assert_array_equal(scores, before)
    assert loudest(KEYS[0], np.full(vocabulary, -np.inf)) == 0


def test_what_is_below_the_loud_integers_is_quiet() -> None:
    edge = int(LOUD)
    below, above = reference.gumbel_of(np.array([edge - 1, edge + (1 << 30)], np.uint64))
    assert below < QUIET < above + 1e-5


def _sampling(source: random.Random, vocabulary: int) -> Sampling:
    return Sampling(
        temperature=source.choice([0.0, 0.3, 0.8, 1.0, 1.7]),
        top_k=source.choice([0, 0, 1, 3, vocabulary - 1, vocabulary, vocabulary + 5]),
        top_p=source.choice([1.0, 1.0, 0.1, 0.5, 0.9, 0.999]),
        seed=source.getrandbits(64),
        choice=source.randrange(4),
        min_p=source.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
        repetition_penalty=source.choice([1.0, 1.0, 1.3, 0.7]),
        presence_penalty=source.choice([0.0, 0.0, 0.5, -1.0]),
        frequency_penalty=source.choice([0.0, 0.0, 0.3, -0.2]),
        logit_bias=source.choice([(), ((0, 2.0), (3, -100.0))]),
    )


def any_row(source: random.Random, vocabulary: int) -> RowSampling:
    """At some position behind some text, of which the last tokens are a window's; id 3 is always left."""
    sampling = _sampling(source, vocabulary)
    text = [source.randrange(vocabulary) for _ in range(source.randrange(1, 40))]
    cut = source.randrange(len(text))
    window = [source.randrange(vocabulary) for _ in range(source.randrange(4))]
    seen = History(text[:cut], text[cut:]).seen(window) if sampling.penalised else None
    allowed = np.array([source.random() < 0.5 or token == 3 for token in range(vocabulary)])
    banned, mask = source.choice([(), (0,), (1, 2)]), source.choice([None, None, allowed])
    return RowSampling(source.randrange(5000), sampling, seen, banned, mask)


def by_the_reference(logits: npt.ArrayLike, row: RowSampling) -> int:
    return acceptance.choose(logits, row.position, row.sampling, row.seen, row.banned, row.allowed)


@pytest.fixture(params=["row by row", "at once"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of CPUs, and those of GPUs on a CPU."""
    if request.param == "at once":
        monkeypatch.setattr(sampler, "on_cpu", lambda _: False)


@pytest.mark.parametrize("seed", range(20))
def test_a_mixed_batch_is_chosen_as_the_reference_chooses_each_row(seed: int) -> None:
    source = random.Random(seed)
    vocabulary, count = source.choice([(5, 9), (60, 30)])
    logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    logits = logits.bfloat16() if seed % 5 == 0 else logits
    logits[:, 4] = -torch.inf  # an id that no token has
    rows = [any_row(source, vocabulary) for _ in range(count)]
    pairs = list(zip(logits.float().numpy(), rows, strict=True))
    assert choose(logits, rows) == [by_the_reference(row, by) for row, by in pairs]
    distributions = [reference_log_p(row, by.sampling, by.seen, by.banned, by.allowed) for row, by in pairs]
    np.testing.assert_allclose(log_probabilities(logits, rows).numpy(), np.stack(distributions), atol=1e-12)


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.7, top_k=2, seed=3), Sampling(temperature=0.7, top_p=0.4, seed=3)]
)
def test_ties_at_the_edge_of_a_filter_are_kept_as_the_reference_keeps_them(sampling: Sampling) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 1.0]]).expand(200, -1)
    rows = [RowSampling(position, sampling) for position in range(200)]
    expected = [acceptance.choose(logits[0].numpy(), row.position, row.sampling) for row in rows]
    assert choose(logits, rows) == expected
    assert set(expected) == {1, 2, 3} if sampling.top_k else set(expected) == {1, 2}


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, 4096)
    logits[1, 17:] = 1.0
    logits[2, [4000, 31]] = 2.0
    assert choose(logits, [RowSampling(position, Sampling()) for position in range(3)]) == [0, 17, 31]
    assert choose(torch.tensor([[0.0, 2.0, 1.0]]).bfloat16(), [RowSampling(0, Sampling())]) == [1]


def test_logits_are_left_as_they_were() -> None:
    """Also where nothing is cast, so that the logits themselves could be changed in place."""
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(2)).double()
    row, before = RowSampling(11, Sampling(temperature=0.6, seed=4)), logits.clone()
    assert choose(logits, [row]) == choose(logits, [row]) == [acceptance.choose(before[0].numpy(), 11, row.sampling)]
    assert torch.equal(logits, before)


def test_rows_must_match() -> None:
    with pytest.raises(ValueError, match="rows: 1 given for 2 rows of logits"):
        choose(torch.zeros(2, 4), [RowSampling(0, Sampling())])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.8),
        Sampling(temperature=0.8, top_p=0.95),
        Sampling(temperature=0.8, top_p=0.999),
        Sampling(temperature=0.8, top_k=40, top_p=0.5),
        Sampling(temperature=0.8, min_p=0.02),
    ],
)
def test_rows_of_a_large_vocabulary_are_chosen_as_the_reference_chooses_them(sampling: Sampling) -> None:
    source = torch.Generator().manual_seed(4)
    logits = torch.randn(12, 16_393, generator=source) * torch.tensor([0.01, 2.0, 5.0] * 4)[:, None]
    rows = [RowSampling(index, replace(sampling, seed=index)) for index in range(12)]
    expected = [by_the_reference(line, row) for line, row in zip(logits.numpy(), rows, strict=True)]
    assert choose(logits, rows) == expected


@dataclass(frozen=True)
class DrawnPart:
    """A text's part of a forward, each row of which is drawn in its own way. guessed: what its window holds."""

    drawn: Sequence[RowSampling]
    guessed: tuple[int, ...] = ()

    @property
    def window(self) -> tuple[DraftToken, ...]:
        return tuple(map(DraftToken, self.guessed))

    @property
    def wanted(self) -> int:
        return len(self.drawn)

    def rows(self) -> list[RowSampling]:
        return [*self.drawn]


def test_rows_behind_a_wrong_guess_are_not_chosen_for_on_a_cpu() -> None:
    """But under rules that judge the window themselves; a decision is the same either way."""
    coupled = Sampling(temperature=1.0, seed=8)
    logits = torch.randn(4, 90, generator=torch.Generator().manual_seed(5))
    judged = replace(coupled, acceptance=Acceptance.parse("rejection"))
    drawn, weighed = ([RowSampling(index, sampling) for index in range(4)] for sampling in (coupled, judged))
    whole = choose(logits, drawn)
    right = (whole[0], whole[1] ^ 1, whole[2])
    windows = [
        *(DrawnPart(drawn, right), DrawnPart(weighed, right)),
        *(DrawnPart(drawn, tuple(whole[:3])), DrawnPart(drawn[:1])),
    ]
    told = LogitsSampler().choose(torch.cat([logits, logits, logits, logits[:1]]), windows, lambda _: True)
    kept = 2 if sampler.on_cpu(logits) else 4
    assert [each.tokens for each in told] == [whole[:kept], whole, whole, whole[:1]]
    assert decide(told[0].tokens, right) == decide(whole, right)


# ----------------------------------------------------------------------------------------------------------------------
# Reported log-probabilities are those of the numpy reference, whichever distribution they are of.

TIED = torch.tensor([[0.0, 2.0, 2.0, -torch.inf, 2.0, 1.0]])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("of", LogprobsOf)
def test_reports_equal_the_reference(of: LogprobsOf, temperature: float) -> None:
    sampling = Sampling(
        temperature, top_k=9, repetition_penalty=1.4, logit_bias=((2, 1.5),), logprobs=5, logprobs_of=of
    )
    logits = torch.randn(7, 40, generator=torch.Generator().manual_seed(3)) * 2
    history = History([1, 2, 3], [4, 4])
    rows = [RowSampling(5 + index, sampling, history.seen([7] * index), (0,)) for index in range(7)]
    tokens = choose(logits, rows)
    for got, row, line, token in zip(logprobs(logits, rows, tokens), rows, logits.numpy(), tokens, strict=True):
        by_model = reference_log_p(line, Sampling())
        processed = reference_log_p(line, sampling, row.seen, row.banned)
        expected = report(by_model if of is LogprobsOf.MODEL else processed, token, 5)
        assert [each for each, _ in got.top] == [each for each, _ in expected.top]
        np.testing.assert_allclose([value for _, value in got.top], [value for _, value in expected.top], rtol=1e-6)
        assert got.logprob == pytest.approx(expected.logprob, rel=1e-6)


def test_of_equal_ids_the_lowest_are_reported_and_none_of_probability_0() -> None:
    def top(count: int) -> list[int]:
        (got,) = logprobs(TIED, [RowSampling(0, Sampling(logprobs=count))], [1])
        return [token for token, _ in got.top]

    assert (top(2), top(4), top(6)) == ([1, 2], [1, 2, 4, 5], [1, 2, 4, 5, 0])


def test_without_top_ids_only_the_token_is_reported() -> None:
    (got,) = logprobs(TIED, [RowSampling(0, Sampling(logprobs=0))], [0])
    assert got.top == ()
    assert got.logprob == rounded(reference_log_p(TIED[0].numpy(), Sampling())[0])
