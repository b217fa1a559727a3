"""`choose` in torch decides what the numpy reference decides; the noise has the same integers."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest
import torch

from specwire.core.law import acceptance
from specwire.core.law import noise as reference
from specwire.core.law.acceptance import RowSampling
from specwire.core.law.noise import Key
from specwire.core.law.sampling import History, Sampling
from specwire.core.law.sampling import log_probabilities as reference_log_p
from specwire.lm.law.logits import log_probabilities
from specwire.lm.law.noise import KEPT_VOCABULARY, ROWS_APART, gumbel, gumbel_row, uniform_integers
from specwire.lm.law.sampler import choose

KEYS = [Key(0, 0, 0), Key((1 << 64) - 1, (1 << 32) - 1, 4095), Key(0x0123456789ABCDEF, 7, 31), Key(1 << 63, 1, 1)]


def test_integers_are_those_of_the_reference() -> None:
    ids = np.array([0, 1, 2, 77, 4095, 151_935, (1 << 31) - 1])
    got = uniform_integers(KEYS, torch.from_numpy(ids).unsqueeze(0)).numpy()
    for row, key in zip(got, KEYS, strict=True):
        assert row.tolist() == reference.uniform_integers(*key, ids).tolist()


@pytest.mark.parametrize("vocabulary", [50, KEPT_VOCABULARY + 1])
def test_noise_is_that_of_the_reference(vocabulary: int) -> None:
    rows = gumbel(KEYS, torch.arange(vocabulary).unsqueeze(0)).numpy()
    for row, key in zip(rows, KEYS, strict=True):
        expected = reference.gumbel(*key, np.arange(vocabulary))
        np.testing.assert_array_equal(gumbel_row(key, vocabulary), expected)
        np.testing.assert_allclose(row, expected, rtol=1e-12, atol=1e-12)


def test_noise_does_not_depend_on_which_ids_it_is_made_for() -> None:
    ids = torch.tensor([[5, 3, 40], [1, 49, 2]])
    every = gumbel(KEYS[:2], torch.arange(50).unsqueeze(0))
    assert torch.equal(gumbel(KEYS[:2], ids), every.gather(1, ids))


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


@pytest.mark.parametrize("seed", range(20))
def test_a_mixed_batch_is_chosen_as_the_reference_chooses_each_row(seed: int) -> None:
    source = random.Random(seed)
    vocabulary, count = source.choice([(5, 9), (60, 30)])
    logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, 4] = -torch.inf  # an id that no token has
    rows = [any_row(source, vocabulary) for _ in range(count)]
    pairs = list(zip(logits.numpy(), rows, strict=True))
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


@pytest.mark.parametrize("copies", [1, ROWS_APART + 1])
def test_a_row_is_chosen_alike_alone_and_in_company(copies: int) -> None:
    logits = torch.randn(3 * copies, 40, generator=torch.Generator().manual_seed(1))
    samplings = [Sampling(), Sampling(temperature=1.0, seed=1), Sampling(temperature=0.5, top_k=3, seed=2)] * copies
    rows = [RowSampling(index, sampling) for index, sampling in enumerate(samplings)]
    alone = [choose(logits[index : index + 1], [row])[0] for index, row in enumerate(rows)]
    assert choose(logits, rows) == alone


def test_half_precision_logits_are_taken() -> None:
    logits = torch.randn(2, 30).bfloat16()
    rows = [RowSampling(3, Sampling(temperature=1.0, seed=9)), RowSampling(4, Sampling())]
    expected = [
        acceptance.choose(row.float().numpy(), by.position, by.sampling) for row, by in zip(logits, rows, strict=True)
    ]
    assert choose(logits, rows) == expected


def test_logits_and_kept_noise_are_left_as_they_were() -> None:
    """Also where nothing is cast, so that the logits themselves could be changed in place."""
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(2)).double()
    row, before = RowSampling(11, Sampling(temperature=0.6, seed=4)), logits.clone()
    assert choose(logits, [row]) == choose(logits, [row]) == [acceptance.choose(before[0].numpy(), 11, row.sampling)]
    assert torch.equal(logits, before)
    np.testing.assert_array_equal(gumbel_row(row.key, 60), reference.gumbel(*row.key, np.arange(60)))


def test_rows_must_match() -> None:
    with pytest.raises(ValueError, match="rows: 1 given for 2 rows of logits"):
        choose(torch.zeros(2, 4), [RowSampling(0, Sampling())])


def test_apart_each_row_is_chosen_as_if_it_were_alone() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(3))
    kinds = (Sampling(), Sampling(temperature=0.9, seed=5), Sampling(temperature=1.0, seed=6, top_p=0.8))
    rows = [RowSampling(index, kinds[index % len(kinds)]) for index in range(6)]
    alone = [choose(logits[index : index + 1], [row])[0] for index, row in enumerate(rows)]
    assert choose(logits, rows, apart=True) == alone == choose(logits, rows)
