"""Reported log-probabilities are those of the numpy reference, whichever distribution they are of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specwire.core.law.acceptance import RowSampling
from specwire.core.law.sampling import History, LogprobsOf, Sampling, log_probabilities, report, rounded
from specwire.lm.law.logits import logprobs
from specwire.lm.law.sampler import choose

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
        by_model = log_probabilities(line, Sampling())
        processed = log_probabilities(line, sampling, row.seen, row.banned)
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
    assert got.logprob == rounded(log_probabilities(TIED[0].numpy(), Sampling())[0])
