"""How a drafter draws where the rule weighs draft tokens by the probability that they were drawn with.

The drafter's distribution is cut and rounded to integers first, and the token drawn from those: what is sent with it is
what it was drawn from, exactly. The noise is that of the target's own draw behind the same text, so that a chain often
survives a token that the target drew itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specwire.core.constraint import Mask
from specwire.core.epoch import seed_behind
from specwire.core.history import Seen
from specwire.core.sampling import Sampling
from specwire.core.weights import MOST_KEPT, Weights, draw_quantised, quantise
from specwire.lm import RowSampling, log_probabilities


@dataclass(frozen=True, slots=True)
class WeighedPlace:
    """What one row of logits is for: the token at `position`, behind the text of `prefix_hash`.

    seen: that text, where penalties look at it. allowed: see `specwire.core.sampling.adjusted`.
    """

    position: int
    sampling: Sampling
    epoch: int
    prefix_hash: int
    seen: Seen | None = None
    allowed: Mask | None = None

    @property
    def seed(self) -> int:
        return seed_behind(self.sampling.seed, self.epoch, self.prefix_hash)


def draw_weighed(logits: torch.Tensor, places: Sequence[WeighedPlace]) -> list[tuple[int, Weights]]:
    """The token of each row of `logits` (rows, vocabulary), and what it was drawn from."""
    rows = [RowSampling(place.position, place.sampling, place.seen, allowed=place.allowed) for place in places]
    log_p = log_probabilities(logits, rows)
    best, ids = log_p.topk(min(MOST_KEPT, log_p.shape[1]), dim=1)
    shares, kept = best.exp().cpu().numpy(), ids.cpu().tolist()
    return [_drawn(quantise(shares[index], kept[index]), place) for index, place in enumerate(places)]


def _drawn(weights: Weights, place: WeighedPlace) -> tuple[int, Weights]:
    return draw_quantised(weights, place.seed, place.sampling.choice, place.position), weights
