"""How a drafter or a head picks its next token: as the target would from the same logits, noise included.

Under coupled sampling the target takes argmax(log p + G). A drafter that takes argmax(log q + G) with the same G
agrees far more often than one that draws on its own (arXiv 2408.07978). What happens here changes acceptance only,
never a text, so shortcuts are allowed: noise is drawn for the few ids that can win at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specwire.core.law.constraint import Mask
from specwire.core.law.noise import gumbel
from specwire.core.law.sampling import Sampling, Seen
from specwire.lm.sampler import Key, adjusted, best_of, gumbel_of

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
    return _draw_best(logits, rows)


def whole(sampling: Sampling) -> bool:
    """Whether the target draws by the noise of all ids, as it does where none is filtered out."""
    return sampling.temperature > 0.0 and sampling.top_p == 1.0 and not sampling.top_k


def draw_among(ids: torch.Tensor, logits: torch.Tensor, rows: Sequence[DraftRow], vocabulary: int) -> list[int]:
    """The token of each row of `logits` (rows, len(ids)), which are of these ids alone. Penalties are left out.

    vocabulary: of the target that draws in this process, too.
    """
    if all(row.plain for row in rows):
        chosen: list[int] = ids[best_of(logits)].tolist()
        return chosen
    if logits.device.type == "cpu":
        named, each = ids.numpy(), zip(logits.float().numpy(), rows, strict=True)
        return [_draw_one(scores, named, row, vocabulary if whole(row.sampling) else None)[0] for scores, row in each]
    best, at = logits.float().topk(min(CANDIDATES, logits.shape[1]), dim=1)
    scores, tokens = best.cpu().numpy(), ids[at].cpu().numpy()
    return [_draw_one(scores[index], tokens[index], row)[0] for index, row in enumerate(rows)]


def _draw_best(logits: torch.Tensor, rows: Sequence[DraftRow]) -> list[tuple[int, float]]:
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
    if greedy and np.isfinite(best).all():
        values = best.astype(np.float64)
        scores = (values - values[:, :1]).tolist()
        return [(tuple(tokens), tuple(found)) for tokens, found in zip(ids.tolist(), scores, strict=True)]
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


def _draw_one(scores: Scores, ids: Ids | None, row: DraftRow, shared: int | None = None) -> tuple[int, float]:
    """From one row's logits; `ids` names the tokens that they are of, None stands for 0, 1, 2, ...

    shared: the vocabulary, where the target draws in this process; see `specwire.lm.sampler.gumbel_of`.
    """
    sampling = row.sampling
    best = int(scores.argmax())
    confidence = 1.0 / _relative_mass(scores, best, sampling.temperature or 1.0) if row.rate else 1.0
    if sampling.temperature > 0.0:
        candidates = _candidates(scores, best, sampling)
        if len(candidates) > 1:
            named = candidates if ids is None else ids[candidates]
            best = int(candidates[_loudest(scores[candidates], named, row, shared)])
    return best if ids is None else int(ids[best]), confidence


def _loudest(scores: Scores, ids: Ids, row: DraftRow, shared: int | None) -> int:
    """Index of argmax(log q + G); the normaliser of q is the same for all."""
    sampling, key = row.sampling, Key(row.sampling.seed, row.sampling.choice, row.position)
    noise = gumbel(*key, ids) if shared is None else gumbel_of(key, ids, shared)
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
