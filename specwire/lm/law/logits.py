"""What a request does to logits, and their log-probabilities: the vectorised twin of `specwire.core.law.sampling`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from specwire.core.law.constraint import Mask
from specwire.core.law.sampling import Ids, LogprobsOf, Sampling, Seen, rounded
from specwire.core.messages import Floats, TokenLogprobs

# ----------------------------------------------------------------------------------------------------------------------
# Bias, penalties, bans and constraints on many rows at once: the twin of `specwire.core.law.sampling.adjusted`.


class LogitsRow(Protocol):
    """What one row's logits are changed by; see `RowSampling`."""

    @property
    def sampling(self) -> Sampling: ...
    @property
    def seen(self) -> Seen | None: ...
    @property
    def banned(self) -> tuple[int, ...]: ...
    @property
    def allowed(self) -> Mask | None: ...
    @property
    def adjusted(self) -> bool: ...


def adjusted(logits: torch.Tensor, rows: Sequence[LogitsRow]) -> torch.Tensor:
    """The logits (rows, vocabulary) as they are where no row changes them, else a float64 copy."""
    if not any(row.adjusted for row in rows):
        return logits
    scores = logits.to(torch.float64, copy=True)
    _add_bias(scores, rows)
    _penalise(scores, rows)
    _ban(scores, rows)
    _confine(scores, rows)
    return scores


def _add_bias(scores: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
    pairs = [(index, *pair) for index, row in enumerate(rows) for pair in row.sampling.logit_bias]
    if pairs:
        lines, ids, biases = zip(*pairs, strict=True)
        place = _placed(np.array(lines), np.array(ids), scores)
        scores[place] += torch.tensor(biases, dtype=torch.float64, device=scores.device)


def _penalise(scores: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
    """Only the ids that stand in the texts are touched."""
    marked = [(index, row.sampling, row.seen) for index, row in enumerate(rows) if row.seen is not None]
    if not marked:
        return
    sizes = [len(seen.ids) for _, _, seen in marked]

    def spread(values: Sequence[float]) -> torch.Tensor:
        """Each row's value, once for each of its ids."""
        return torch.from_numpy(np.repeat(np.array(values), sizes)).to(scores.device)

    lines = np.repeat(np.array([index for index, _, _ in marked]), sizes)
    place = _placed(lines, np.concatenate([seen.ids for _, _, seen in marked]), scores)
    counts = torch.from_numpy(np.concatenate([seen.counts for _, _, seen in marked])).to(scores.device)
    repetition = spread([sampling.repetition_penalty for _, sampling, _ in marked])
    presence = spread([sampling.presence_penalty for _, sampling, _ in marked])
    frequency = spread([sampling.frequency_penalty for _, sampling, _ in marked])
    values = scores[place]
    values = torch.where(values < 0.0, values * repetition, values / repetition)
    scores[place] = values - counts * frequency - torch.where(counts > 0, presence, 0.0)


def _ban(scores: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
    pairs = [(index, token) for index, row in enumerate(rows) for token in row.banned]
    if pairs:
        lines, ids = zip(*pairs, strict=True)
        scores[_placed(np.array(lines), np.array(ids), scores)] = -torch.inf


def _confine(scores: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
    """Constraints leave few ids of many, so whole rows are masked."""
    masks = [(index, row.allowed) for index, row in enumerate(rows) if row.allowed is not None]
    if masks:
        lines, allowed = zip(*masks, strict=True)
        forbidden = torch.from_numpy(~np.stack(allowed)).to(scores.device)
        place = torch.tensor(lines, device=scores.device)
        scores[place] = scores[place].masked_fill(forbidden, -torch.inf)


def _placed(lines: Ids, ids: Ids, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of (row, id) pairs, no two of them equal."""
    return torch.from_numpy(lines).to(scores.device), torch.from_numpy(ids).to(scores.device)


# ----------------------------------------------------------------------------------------------------------------------
# Temperature and filters, and the log-probabilities behind them.


@torch.inference_mode()
def log_probabilities(logits: torch.Tensor, rows: Sequence[LogitsRow]) -> torch.Tensor:
    """Processed log-probabilities, float64 (rows, vocabulary): twin of `core.law.sampling.log_probabilities`."""
    scores = adjusted(logits, rows).to(torch.float64, copy=True)
    drawn = [index for index, row in enumerate(rows) if row.sampling.temperature > 0.0]
    if drawn:
        scores[drawn] = filtered(scores[drawn], [rows[index] for index in drawn])
    return scores.log_softmax(dim=1)


def filtered(logits: torch.Tensor, rows: Sequence[LogitsRow]) -> torch.Tensor:
    """Scaled scores; -inf where a filter removes the id."""
    scores = scaled(logits, rows)
    scores = _keep_top_k(scores, [row.sampling.top_k for row in rows])
    scores = _keep_top_p(scores, [row.sampling.top_p for row in rows])
    return _keep_min_p(scores, [row.sampling.min_p for row in rows])


def scaled(logits: torch.Tensor, rows: Sequence[LogitsRow]) -> torch.Tensor:
    """float64 logits / temperature, as the reference computes them."""
    return logits.double() / _column([row.sampling.temperature for row in rows], logits)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(1)


def _keep_top_k(scores: torch.Tensor, top_k: list[int]) -> torch.Tensor:
    """-inf below each row's k-th largest score; ties with it stay; k = 0 keeps all."""
    vocabulary = scores.shape[1]
    ranks = [k if 0 < k < vocabulary else 0 for k in top_k]
    if not any(ranks):
        return scores
    best = scores.topk(max(ranks), dim=1).values
    last = torch.tensor([max(rank - 1, 0) for rank in ranks], device=scores.device).unsqueeze(1)
    off = torch.tensor([rank == 0 for rank in ranks], device=scores.device).unsqueeze(1)
    threshold = best.gather(1, last).masked_fill(off, -torch.inf)
    return scores.masked_fill(scores < threshold, -torch.inf)


def _keep_top_p(scores: torch.Tensor, top_p: list[float]) -> torch.Tensor:
    """-inf outside each row's smallest most-probable set of mass >= p (ties: lower id first); p = 1 keeps all."""
    if all(p == 1.0 for p in top_p):
        return scores
    probabilities = scores.softmax(dim=1)
    ordered, order = probabilities.sort(dim=1, descending=True, stable=True)
    before = ordered.cumsum(dim=1) - ordered
    # Above 1, for rounding may carry the mass before the last ids of an unfiltered row past 1.
    limits = _column([p if p < 1.0 else 2.0 for p in top_p], scores)
    removed = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, before >= limits)
    return scores.masked_fill(removed, -torch.inf)


def _keep_min_p(scores: torch.Tensor, min_p: list[float]) -> torch.Tensor:
    """-inf below the best score + log min_p of each row; 0 keeps all."""
    if not any(min_p):
        return scores
    least = [math.log(p) if p > 0.0 else -math.inf for p in min_p]
    return scores.masked_fill(scores < scores.amax(dim=1, keepdim=True) + _column(least, scores), -torch.inf)


def surviving(scores: Floats, sampling: Sampling) -> Ids:
    """Of one row on a CPU the ids that no filter removes, rising. scores: (vocabulary,), divided by the temperature."""
    ids = np.arange(len(scores))
    if 0 < sampling.top_k < len(scores):
        ids = (scores >= np.partition(scores, -sampling.top_k)[-sampling.top_k]).nonzero()[0]
    if sampling.top_p < 1.0:
        ids = ids[_reach(scores[ids], sampling.top_p)]
    if sampling.min_p > 0.0:
        ids = ids[scores[ids] >= scores.max() + math.log(sampling.min_p)]
    return ids


def _reach(scores: Floats, top_p: float) -> Ids:
    """Places of the smallest most-probable set of mass >= top_p, rising. Most ids of a large vocabulary are too
    improbable to be in it: all those below (1 - top_p) / vocabulary together lack the mass to be missed.
    """
    weights = np.exp(scores - scores.max())
    shares = weights / weights.sum()
    able = (shares >= 0.5 * (1.0 - top_p) / len(shares)).nonzero()[0]
    ordered = able[np.argsort(-shares[able], kind="stable")]
    mass = shares[ordered]
    reached: Ids = np.sort(ordered[mass.cumsum() - mass < top_p])
    return reached


# ----------------------------------------------------------------------------------------------------------------------
# Log-probabilities of decided tokens: the vectorised twin of `specwire.core.law.sampling.report`.


@torch.inference_mode()
def logprobs(logits: torch.Tensor, rows: Sequence[LogitsRow], tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    """One per token: tokens[i] was decided from logits[i]; the rows are of one session, which asked for a report.

    Args:
        logits: (len(tokens), vocabulary).
    """
    if not tokens:
        return ()
    sampling = rows[0].sampling
    if sampling.logprobs_of is LogprobsOf.PROCESSED:
        log_p = log_probabilities(logits, rows)
    else:
        log_p = logits.double().log_softmax(dim=1)
    own = log_p.gather(1, torch.tensor(tokens, device=log_p.device).unsqueeze(1)).squeeze(1).tolist()
    top = _top(log_p, sampling.logprobs or 0)
    return tuple(TokenLogprobs(rounded(value), best) for value, best in zip(own, top, strict=True))


def _top(log_p: torch.Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """The best ids of each row. Which of equal ones `topk` returns is undefined, so all that equal the last compete."""
    if count == 0:
        return [()] * len(log_p)
    last = log_p.topk(min(count, log_p.shape[1]), dim=1).values[:, -1:]
    rivals = (log_p >= last) & (log_p > -torch.inf)
    return [_best_ids(row, rival, count) for row, rival in zip(log_p, rivals, strict=True)]


def _best_ids(log_p: torch.Tensor, rival: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    ids = rival.nonzero().squeeze(1)
    ordered, order = log_p[ids].sort(descending=True, stable=True)
    chosen = zip(ids[order[:count]].tolist(), ordered[:count].tolist(), strict=True)
    return tuple((token, rounded(value)) for token, value in chosen)


def best_of(scores: torch.Tensor) -> torch.Tensor:
    """The place of each row's largest element, the first of several.

    On CPUs NumPy's search is vectorised where PyTorch's goes element by element.
    """
    if scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(scores.numpy().argmax(axis=1))
    return scores.argmax(dim=1)
