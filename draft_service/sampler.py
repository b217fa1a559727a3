"""How a drafter draws its next token: as the target would, noise included."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from draft_service.sessions import Expansion
from specwire.core.draft import Drawn
from specwire.core.law.acceptance import draw_quantised, quantise
from specwire.core.law.constraint import Mask
from specwire.core.law.noise import gumbel, seed_behind
from specwire.core.law.sampling import Sampling, Seen
from specwire.core.messages import MOST_KEPT, Weights
from specwire.core.text import extend_hash
from specwire.lm import RowSampling, log_probabilities
from specwire.lm.sampler import adjusted

# ----------------------------------------------------------------------------------------------------------------------
# How a drafter picks its next token: as the target would from the same logits, noise included.
#
# Under coupled sampling the target takes argmax(log p + G). A drafter that takes argmax(log q + G) with the same G
# agrees far more often than one that draws on its own (arXiv 2408.07978). What happens here changes acceptance only,
# never a text, so shortcuts are allowed: noise is drawn for the few ids that can win at all.

CANDIDATES = 64
# Ids less likely than this, relative to the likeliest, are left out: a dominant id needs no noise.
LEAST_RELATIVE_PROBABILITY = 1e-4

LEAST_LOG = -math.log(LEAST_RELATIVE_PROBABILITY)

Scores = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DraftRow:
    """What one row of logits is for; `rate` asks for a confidence. seen: the text, where penalties look at it.

    allowed: see `specwire.core.law.sampling.adjusted`.
    """

    position: int
    sampling: Sampling
    rate: bool
    seen: Seen | None = None
    allowed: Mask | None = None

    @property
    def plain(self) -> bool:
        return self.sampling.temperature == 0.0 and not self.rate

    @property
    def adjusted(self) -> bool:
        return self.seen is not None or self.allowed is not None or bool(self.sampling.logit_bias)

    @property
    def banned(self) -> tuple[int, ...]:
        """None: only the verifier knows which ids may not end the text yet."""
        return ()


def draw(logits: torch.Tensor, rows: Sequence[DraftRow]) -> list[tuple[int, float]]:
    """The token of each row of `logits` (rows, vocabulary), and the drafter's confidence in it (1.0 if not asked).

    The confidence is the probability of the likeliest token: under greedy that is the token drawn; under coupled it
    says more about agreement than the drawn token's own probability does, because both models see the same noise.
    """
    if any(row.adjusted for row in rows):
        logits = adjusted(logits, rows).float()
    if all(row.plain for row in rows):
        return [(token, 1.0) for token in logits.argmax(dim=1).tolist()]
    if logits.device.type == "cpu":
        return [_draw_one(scores, None, row) for scores, row in zip(logits.numpy(), rows, strict=True)]
    # Not worth carrying whole rows over; confidence and top_p then count the candidates' mass alone.
    best, ids = (each.cpu().numpy() for each in logits.topk(min(CANDIDATES, logits.shape[1]), dim=1))
    return [_draw_one(best[index], ids[index], row) for index, row in enumerate(rows)]


Ranked = tuple[tuple[int, ...], tuple[float, ...]]


def draw_candidates(logits: torch.Tensor, rows: Sequence[DraftRow], most: int) -> list[Ranked]:
    """Up to `most` ids that may be the target's token of each row, the likeliest first, and their scores.

    A score is what is drawn by: log q, under coupled log q / T + G, in nats relative to the best id's.
    """
    if any(row.adjusted for row in rows):
        logits = adjusted(logits, rows).float()
    greedy = all(row.sampling.temperature == 0.0 for row in rows)
    kept = min(most if greedy else CANDIDATES, logits.shape[1])
    best, ids = (each.cpu().numpy() for each in logits.topk(kept, dim=1))
    return [_ranked(best[index], ids[index], row, most) for index, row in enumerate(rows)]


def _ranked(scores: Scores, ids: Ids, row: DraftRow, most: int) -> Ranked:
    """scores: the highest of one row, falling; they are of `ids`."""
    sampling, found = row.sampling, np.flatnonzero(np.isfinite(scores))
    values = scores[found].astype(np.float64)
    if sampling.temperature > 0.0:
        found = _candidates(scores, 0, sampling)
        noise = gumbel(sampling.seed, sampling.choice, row.position, ids[found])
        values = scores[found].astype(np.float64) / sampling.temperature + noise
    order = np.argsort(-values, kind="stable")[:most]
    tokens, kept = ids[found[order]].tolist(), values[order]
    return tuple(tokens), tuple((kept - kept[0]).tolist())


def _draw_one(scores: Scores, ids: Ids | None, row: DraftRow) -> tuple[int, float]:
    """From one row's logits; `ids` names the tokens that they are of, None stands for 0, 1, 2, ..."""
    sampling = row.sampling
    best = int(scores.argmax())
    confidence = 1.0 / _relative_mass(scores, best, sampling.temperature or 1.0) if row.rate else 1.0
    if sampling.temperature > 0.0:
        candidates = _candidates(scores, best, sampling)
        if len(candidates) > 1:
            best = int(candidates[_loudest(scores[candidates], candidates if ids is None else ids[candidates], row)])
    return best if ids is None else int(ids[best]), confidence


def _loudest(scores: Scores, ids: Ids, row: DraftRow) -> int:
    """Index of argmax(log q + G); the normaliser of q is the same for all."""
    sampling = row.sampling
    noise = gumbel(sampling.seed, sampling.choice, row.position, ids)
    return int((scores.astype(np.float64) / sampling.temperature + noise).argmax())


def _candidates(scores: Scores, best: int, sampling: Sampling) -> Ids:
    """Indices of the scores that take part; at least one. Filters apply in the target's order: top_k, then top_p."""
    found = np.flatnonzero(scores >= scores[best] - sampling.temperature * LEAST_LOG)
    most = min(CANDIDATES, sampling.top_k or CANDIDATES)
    if len(found) > most:
        found = found[np.argpartition(scores[found], -most)[-most:]]
    if sampling.top_p == 1.0 or len(found) == 1:
        return found
    found = found[np.argsort(-scores[found], kind="stable")]
    weights = np.exp((scores[found] - scores[best]) / sampling.temperature)
    mass = weights.sum() if sampling.top_k else _relative_mass(scores, best, sampling.temperature)
    return found[: 1 + int(np.searchsorted(weights.cumsum()[:-1], sampling.top_p * mass, side="left"))]


def _relative_mass(scores: Scores, best: int, temperature: float) -> float:
    """The sum of all probabilities over the largest one."""
    return float(np.exp((scores - scores[best]) / np.float32(temperature)).sum())


# ----------------------------------------------------------------------------------------------------------------------
# How a drafter draws under rules that weigh draft tokens by the probability that they were drawn with. The drafter's
# distribution is first cut and rounded to integers, and the token is drawn from those: so the weights sent with it are
# exactly what it was drawn from. The noise is that of the target's own draw behind the same text, so that a chain often
# survives a token that the target drew itself.


@dataclass(frozen=True, slots=True)
class WeighedPlace:
    """What one row of logits is for: the token at `position`, behind the text of `prefix_hash`.

    seen: that text, where penalties look at it. allowed: see `specwire.core.law.sampling.adjusted`.
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


# ----------------------------------------------------------------------------------------------------------------------
# Draws what may follow the sessions' places, from the rows of one forward.


def guesses(logits: torch.Tensor, rows: Sequence[int], drawing: Sequence[Expansion]) -> list[Drawn]:
    """What may follow each place, from its row of the logits as its session's rule has it."""
    if len(rows) < len(logits):
        logits = logits[list(rows)]
    drawn: dict[int, Drawn] = {}
    for chosen, draw_all in (
        ([at for at, place in enumerate(drawing) if place.drafting.session.weighed], _weighed),
        ([at for at, place in enumerate(drawing) if _is_chain(place)], _chains),
        ([at for at, place in enumerate(drawing) if place.most > 1], _candidates_of),
    ):
        if chosen:
            own = logits if len(chosen) == len(drawing) else logits[chosen]
            drawn |= zip(chosen, draw_all(own, [drawing[at] for at in chosen]), strict=True)
    return [drawn[at] for at in range(len(drawing))]


def _is_chain(place: Expansion) -> bool:
    return place.most == 1 and not place.drafting.session.weighed


def _weighed(logits: torch.Tensor, drawing: Sequence[Expansion]) -> list[Drawn]:
    return [Drawn((token,), weights=weights) for token, weights in draw_weighed(logits, [_place(it) for it in drawing])]


def _chains(logits: torch.Tensor, drawing: Sequence[Expansion]) -> list[Drawn]:
    return [Drawn((token,), confidence) for token, confidence in draw(logits, [_row(place) for place in drawing])]


def _candidates_of(logits: torch.Tensor, drawing: Sequence[Expansion]) -> list[Drawn]:
    ranked = draw_candidates(logits, [_row(place) for place in drawing], max(place.most for place in drawing))
    return [Drawn(tokens, scores=scores) for tokens, scores in ranked]


def _row(place: Expansion) -> DraftRow:
    drafting = place.drafting
    rate = drafting.session.pace.confidence_floor > 0.0
    return DraftRow(place.position, drafting.sampling, rate, drafting.seen(place.path), drafting.allowed(place.path))


def _place(place: Expansion) -> WeighedPlace:
    drafting, path = place.drafting, place.path
    session = drafting.session
    prefix = session.text.hash_at(session.decided)
    for token in path:
        prefix = extend_hash(prefix, token)
    seen, allowed = drafting.seen(path), drafting.allowed(path)
    return WeighedPlace(place.position, drafting.sampling, session.epoch, prefix, seen, allowed)
