"""The target's choice at every row of a forward: the vectorised twin of `specwire.core.acceptance.choose`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from specwire.core.constraint import Mask
from specwire.core.history import Seen
from specwire.core.sampling import Sampling
from specwire.lm.adjust import adjusted
from specwire.lm.noise import Key, gumbel, gumbel_rows


class RowSampling(NamedTuple):
    """How to choose the token at `position`, whose logits are one row.

    seen, banned, allowed: see `specwire.core.sampling.adjusted`.
    """

    position: int
    sampling: Sampling
    seen: Seen | None = None
    banned: tuple[int, ...] = ()
    allowed: Mask | None = None

    @property
    def key(self) -> Key:
        return Key(self.sampling.seed, self.sampling.choice, self.position)

    @property
    def adjusted(self) -> bool:
        """The logits are changed before anything is drawn from them."""
        changed = self.seen is not None or self.allowed is not None
        return changed or bool(self.banned) or bool(self.sampling.logit_bias)

    @property
    def filtered(self) -> bool:
        return self.sampling.top_k > 0 or self.sampling.top_p < 1.0 or self.sampling.min_p > 0.0


@torch.inference_mode()
def choose(logits: torch.Tensor, rows: Sequence[RowSampling], apart: bool = False) -> list[int]:
    """The target's token for each row, a function of the row's logits and its RowSampling alone.

    Args:
        logits: (rows, vocabulary), any float type. A masked id has -inf.
        apart: also to the last bit of the noise, whose logarithms kernels may round by where in a batch they stand.

    Rows that are adjusted are so first. Greedy rows: argmax, ties to the lowest id. Coupled rows: argmax(log p + G);
    log p is used without its normaliser, which is the same for all ids of a row. What reaches the host is the tokens.
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"rows: {len(rows)} given for {logits.shape[0]} rows of logits")
    if apart and len(rows) > 1:
        return [choose(logits[index : index + 1], [row])[0] for index, row in enumerate(rows)]
    if all(row.sampling.temperature == 0.0 and not row.adjusted for row in rows):
        return _ids(_greedy(logits, rows))
    chosen = torch.zeros(len(rows), dtype=torch.long, device=logits.device)
    for members, pick in zip(_by_kind(rows), (_greedy, _coupled, _coupled_filtered), strict=True):
        if members:
            part = [rows[member] for member in members]
            chosen[members] = pick(adjusted(logits[members], part), part)
    return _ids(chosen)


def _ids(chosen: torch.Tensor) -> list[int]:
    ids: list[int] = chosen.tolist()
    return ids


def _by_kind(rows: Sequence[RowSampling]) -> tuple[list[int], list[int], list[int]]:
    """Indices of the greedy, the unfiltered and the filtered rows."""
    kinds: tuple[list[int], list[int], list[int]] = ([], [], [])
    for index, row in enumerate(rows):
        kinds[0 if row.sampling.temperature == 0.0 else 1 + row.filtered].append(index)
    return kinds


def _greedy(logits: torch.Tensor, _rows: Sequence[RowSampling]) -> torch.Tensor:
    return _best(logits)


def _best(scores: torch.Tensor) -> torch.Tensor:
    """The place of each row's largest element, the first of several.

    On CPUs NumPy's search is vectorised where PyTorch's goes element by element.
    """
    if scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(scores.numpy().argmax(axis=1))
    return scores.argmax(dim=1)


def _coupled(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    noise = gumbel_rows([row.key for row in rows], logits.shape[1], logits.device)
    return _best(_scaled(logits, rows) + noise)


def _coupled_filtered(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Noise is made only for ids that survive: the best `count` of each row, where `count` is the most of any row."""
    scores = _filtered(logits, rows)
    count = int((scores > -torch.inf).sum(dim=1).max())
    best, ids = scores.topk(max(count, 1), dim=1)
    winners = (best + gumbel([row.key for row in rows], ids)).argmax(dim=1, keepdim=True)
    return ids.gather(1, winners).squeeze(1)


@torch.inference_mode()
def log_probabilities(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Processed log-probabilities, float64 (rows, vocabulary): twin of `specwire.core.sampling.log_probabilities`."""
    scores = adjusted(logits, rows).to(torch.float64, copy=True)
    drawn = [index for index, row in enumerate(rows) if row.sampling.temperature > 0.0]
    if drawn:
        scores[drawn] = _filtered(scores[drawn], [rows[index] for index in drawn])
    return scores.log_softmax(dim=1)


def _filtered(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Scaled scores; -inf where a filter removes the id."""
    scores = _scaled(logits, rows)
    scores = _keep_top_k(scores, [row.sampling.top_k for row in rows])
    scores = _keep_top_p(scores, [row.sampling.top_p for row in rows])
    return _keep_min_p(scores, [row.sampling.min_p for row in rows])


def _scaled(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
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
