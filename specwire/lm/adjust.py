"""Bias, penalties, bans and constraints on many rows at once: the vectorised twin of `core.sampling.adjusted`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from specwire.core.constraint import Mask
from specwire.core.history import Ids, Seen
from specwire.core.sampling import Sampling


class LogitsRow(Protocol):
    """What one row's logits are changed by; see `specwire.lm.choose.RowSampling`."""

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
