"""Log-probabilities that are reported with a decided token (numpy reference of `specwire.lm.logprobs`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan

import numpy as np

from specwire.core.sampling import Floats


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms, rounded to float32: what the wire and the log carry is what was reported.

    logprob: of the decided token. top: the most probable ids and theirs, falling, ties by rising id; without ids of
    probability 0.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def report(log_p: Floats, token: int, count: int) -> TokenLogprobs:
    """What is reported of `token`, drawn where log-probabilities are `log_p` (vocabulary,); `count`: of the top ids."""
    best = np.argsort(-log_p, kind="stable")[:count]
    top = tuple((int(index), rounded(log_p[index])) for index in best if log_p[index] > -np.inf)
    return TokenLogprobs(rounded(log_p[token]), top)


def finite(logprob: float) -> float:
    """For JSON, which has no infinity: OpenAI writes -9999 for what is all but impossible."""
    return max(logprob, -9999.0)


def check_numbers(reported: TokenLogprobs) -> TokenLogprobs:
    """`reported`; ValueError where it holds what is no number: it came from elsewhere."""
    if isnan(reported.logprob) or any(isnan(value) for _, value in reported.top):
        raise ValueError("logprobs: NaN is no number")
    return reported


def rounded(value: float) -> float:
    """To float32."""
    return float(np.float32(value))
