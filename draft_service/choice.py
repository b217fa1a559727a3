"""How a drafter picks its next token: as the target would from the same logits, noise included.

Under coupled sampling the target takes argmax(log p + G). A drafter that takes argmax(log q + G) with the same G agrees
far more often than one that draws on its own (arXiv 2408.07978). What happens here changes acceptance only, never a
text, so shortcuts are allowed: noise is drawn for the few ids that can win at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specwire.core.noise import gumbel
from specwire.core.sampling import Sampling

CANDIDATES = 64
# Ids less likely than this, relative to the likeliest, are left out: where one id dominates no noise is needed.
LEAST_RELATIVE_PROBABILITY = 1e-4

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Row:
    """What one row of logits is for; `rate` asks for a confidence."""

    position: int
    sampling: Sampling
    rate: bool

    @property
    def plain(self) -> bool:
        return self.sampling.temperature == 0.0 and not self.rate


def draw(logits: torch.Tensor, rows: Sequence[Row]) -> list[tuple[int, float]]:
    """The token of each row of `logits` (rows, vocabulary), and the drafter's confidence in it (1.0 if not asked).

    The confidence is the probability of the likeliest token: under greedy that is the token drawn; under coupled it
    says more about agreement than the drawn token's own probability does, because both models see the same noise.
    """
    if all(row.plain for row in rows):
        return [(token, 1.0) for token in logits.argmax(dim=1).tolist()]
    scores, ids = logits.topk(min(CANDIDATES, logits.shape[1]), dim=1)
    normalisers = _normalisers(logits, rows) if any(_needs_normaliser(row) for row in rows) else [0.0] * len(rows)
    top, candidates = scores.double().cpu().numpy(), ids.cpu().numpy()
    return [_draw_one(top[index], candidates[index], row, normalisers[index]) for index, row in enumerate(rows)]


def _needs_normaliser(row: Row) -> bool:
    return row.rate or row.sampling.top_p < 1.0


def _normalisers(logits: torch.Tensor, rows: Sequence[Row]) -> list[float]:
    """log(sum(exp(logits / temperature))) of each row, over the whole vocabulary."""
    temperatures = [[row.sampling.temperature or 1.0] for row in rows]
    scaled = logits / torch.tensor(temperatures, dtype=logits.dtype, device=logits.device)
    result: list[float] = scaled.logsumexp(dim=1).tolist()
    return result


def _draw_one(scores: Floats, ids: npt.NDArray[np.int64], row: Row, normaliser: float) -> tuple[int, float]:
    """From one row's largest logits, in falling order."""
    sampling = row.sampling
    scaled = scores / (sampling.temperature or 1.0)
    confidence = math.exp(scaled[0] - normaliser) if row.rate else 1.0
    if sampling.temperature == 0.0:
        return int(ids[0]), confidence
    count = _candidates(scaled, sampling, normaliser)
    if count == 1:
        return int(ids[0]), confidence
    noise = gumbel(sampling.seed, sampling.choice, row.position, ids[:count])
    return int(ids[int(np.argmax(scaled[:count] + noise))]), confidence


def _candidates(scaled: Floats, sampling: Sampling, normaliser: float) -> int:
    """How many of the likeliest ids take part; at least one. Filters apply in the target's order: top_k, then top_p."""
    count = int(np.searchsorted(-scaled, -scaled[0] - math.log(LEAST_RELATIVE_PROBABILITY), side="right"))
    if 0 < sampling.top_k < len(scaled):
        count = min(count, sampling.top_k)
        kept = scaled[: sampling.top_k]
        normaliser = float(kept[0] + np.log(np.exp(kept - kept[0]).sum()))
    if sampling.top_p < 1.0:
        before = np.cumsum(np.exp(scaled[:count] - normaliser))
        count = 1 + int(np.searchsorted(before[:-1], sampling.top_p, side="left"))
    return count
