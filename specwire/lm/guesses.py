"""How a drafter or a head picks its next token: as the target would from the same logits, noise included.

Under coupled sampling the target takes argmax(log p + G). A drafter that takes argmax(log q + G) with the same G agrees
far more often than one that draws on its own (arXiv 2408.07978). Under the default rules what happens here changes
acceptance only, never a text, so shortcuts are allowed: noise is drawn for the few ids that can win at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from specwire.core.draft import DraftRow, Drawn, HeadRequest
from specwire.core.law import noise as reference
from specwire.core.law.noise import draw_quantised, quantise
from specwire.core.law.sampling import Ids, Sampling
from specwire.core.messages import MOST_KEPT, Weights
from specwire.core.model import SlotModel
from specwire.lm.law.logits import adjusted, best_of, log_probabilities
from specwire.text.vocabulary_map import MOST_VOCABULARIES, VocabularyMap

CANDIDATES = 64
# Ids less likely than this, relative to the likeliest, are left out: a dominant id needs no noise.
LEAST_RELATIVE_PROBABILITY = 1e-4

LEAST_LOG = -math.log(LEAST_RELATIVE_PROBABILITY)

Scores = npt.NDArray[np.float32]


def draw(logits: torch.Tensor, rows: Sequence[DraftRow]) -> list[int]:
    """The token of each row of `logits` (rows, vocabulary)."""
    if any(row.adjusted for row in rows):
        logits = adjusted(logits, rows).float()
    return _drawn_of(None, logits, rows)


def draw_among(ids: torch.Tensor, logits: torch.Tensor, rows: Sequence[DraftRow]) -> list[int]:
    """The token of each row of `logits` (rows, len(ids)), which are of these ids alone. Penalties are left out."""
    return _drawn_of(ids, logits.float(), rows)


def _drawn_of(ids: torch.Tensor | None, logits: torch.Tensor, rows: Sequence[DraftRow]) -> list[int]:
    """ids: of each place of a row; None for the places themselves."""
    if all(row.plain for row in rows):
        best = best_of(logits)
        chosen: list[int] = (best if ids is None else ids[best]).tolist()
        return chosen
    if logits.device.type == "cpu":
        named = None if ids is None else ids.numpy()
        return [_draw_one(scores, named, row) for scores, row in zip(logits.numpy(), rows, strict=True)]
    # Not worth carrying whole rows over; top_p then counts the candidates' mass alone.
    top, at = logits.topk(min(CANDIDATES, logits.shape[1]), dim=1)
    scores, tokens = top.cpu().numpy(), (at if ids is None else ids[at]).cpu().numpy()
    return [_draw_one(scores[index], tokens[index], row) for index, row in enumerate(rows)]


# Logits (requests, vocabulary) behind these requests' texts and what was drafted behind all of them.
DraftForward = Callable[[Sequence[int], Sequence[Sequence[int]]], torch.Tensor]


def draft_behind(lm: SlotModel, requests: Sequence[HeadRequest], forward: DraftForward) -> list[list[int]]:
    """Behind each text as many tokens as are asked for, or as fit into the context, by a forward for each of them.

    ValueError unless exactly what is before a text's last token is cached.
    """
    for slot, tokens, *_ in requests:
        if lm.cached(slot) != len(tokens) - 1:
            raise ValueError(f"tokens: slot {slot} holds {lm.cached(slot)} positions of {len(tokens)}")
    most = [min(request.depth, lm.info.context - len(request.tokens)) for request in requests]
    drafted: list[list[int]] = [[] for _ in requests]
    while going := [at for at, tokens in enumerate(drafted) if len(tokens) < most[at]]:
        rows = [DraftRow(len(requests[at].tokens) + len(drafted[at]), requests[at].sampling) for at in going]
        for at, token in zip(going, draw(forward(going, drafted), rows), strict=True):
            drafted[at].append(token)
    return drafted


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
        noise = reference.gumbel(sampling.seed, sampling.choice, row.position, ids[found])
        values = scores[found].astype(np.float64) / sampling.temperature + noise
    order = np.argsort(-values, kind="stable")[:most]
    tokens, kept = ids[found[order]].tolist(), values[order]
    return tuple(tokens), tuple((kept - kept[0]).tolist())


def _draw_one(scores: Scores, ids: Ids | None, row: DraftRow) -> int:
    """From one row's logits; `ids` names the tokens that they are of, None stands for 0, 1, 2, ..."""
    sampling = row.sampling
    best = int(scores.argmax())
    if sampling.temperature > 0.0:
        candidates = _candidates(scores, best, sampling)
        if len(candidates) > 1:
            named = candidates if ids is None else ids[candidates]
            best = int(candidates[_loudest(scores[candidates], named, row)])
    return best if ids is None else int(ids[best])


def _loudest(scores: Scores, ids: Ids, row: DraftRow) -> int:
    """Index of argmax(log q + G); the normaliser of q is the same for all."""
    sampling = row.sampling
    noise = reference.gumbel(sampling.seed, sampling.choice, row.position, ids)
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
# What may follow the places that a drafter extends, drawn as each text's rule has it.
#
# Under rules that weigh draft tokens by the probability that they were drawn with, the drafter's distribution is first
# cut and rounded to integers, and the token is drawn from those: so the weights sent with it are exactly what it was
# drawn from. The noise is that of the target's own draw behind the same text, so that a chain often survives a token
# that the target drew itself.


# Draws from logits by the ids of the rows' target.
DrawAll = Callable[[torch.Tensor, Sequence[DraftRow]], list[Drawn]]


class DraftPlace(Protocol):
    """A place to draft behind."""

    def row(self) -> DraftRow: ...


def guesses(logits: torch.Tensor, rows: Sequence[int], places: Sequence[DraftPlace]) -> list[Drawn]:
    """What may follow each place, from its row of the logits."""
    if len(rows) < len(logits):
        logits = logits[list(rows)]
    wanted = [place.row() for place in places]
    alike: dict[tuple[VocabularyMap | None, DrawAll], list[int]] = {}
    for at, row in enumerate(wanted):
        drawer: DrawAll = _weighed if row.weighed else _chains if row.most == 1 else _candidates_of
        alike.setdefault((row.vocabularies, drawer), []).append(at)
    drawn: dict[int, Drawn] = {}
    for (vocabularies, draw_all), chosen in alike.items():
        own = logits if len(chosen) == len(wanted) else logits[chosen]
        named = own if vocabularies is None else shared(own, vocabularies)
        drawn |= zip(chosen, draw_all(named, [wanted[at] for at in chosen]), strict=True)
    return [drawn[at] for at in range(len(wanted))]


def shared(logits: torch.Tensor, vocabularies: VocabularyMap) -> torch.Tensor:
    """A drafter's logits (rows, its vocabulary) by the target's ids (rows, its vocabulary): -inf where it has no token.

    So what is drawn from them is one of the target's tokens, with the noise of that one's id.
    """
    none = logits.new_full((len(logits), 1), -torch.inf)
    return torch.cat((logits, none), dim=1).index_select(1, _columns(vocabularies, logits.shape[1], logits.device))


@lru_cache(maxsize=MOST_VOCABULARIES)
def _columns(vocabularies: VocabularyMap, width: int, device: torch.device) -> torch.Tensor:
    """Where each of the target's tokens stands; `width` for nowhere."""
    own = torch.tensor(vocabularies.own_of, device=device)
    return torch.where(own < 0, width, own)


def _weighed(logits: torch.Tensor, rows: Sequence[DraftRow]) -> list[Drawn]:
    return [Drawn((token,), weights=weights) for token, weights in draw_weighed(logits, rows)]


def _chains(logits: torch.Tensor, rows: Sequence[DraftRow]) -> list[Drawn]:
    return [Drawn((token,)) for token in draw(logits, rows)]


def _candidates_of(logits: torch.Tensor, rows: Sequence[DraftRow]) -> list[Drawn]:
    ranked = draw_candidates(logits, rows, max(row.most for row in rows))
    return [Drawn(tokens, scores=scores) for tokens, scores in ranked]


def draw_weighed(logits: torch.Tensor, rows: Sequence[DraftRow]) -> list[tuple[int, Weights]]:
    """The token of each row of `logits` (rows, vocabulary), and what it was drawn from."""
    log_p = log_probabilities(logits, rows)
    best, ids = log_p.topk(min(MOST_KEPT, log_p.shape[1]), dim=1)
    shares, kept = best.exp().cpu().numpy(), ids.cpu().tolist()
    return [_drawn(quantise(shares[index], kept[index]), row) for index, row in enumerate(rows)]


def _drawn(weights: Weights, row: DraftRow) -> tuple[int, Weights]:
    return draw_quantised(weights, row.seed, row.sampling.choice, row.position), weights
