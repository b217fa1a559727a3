"""From logits to tokens: the target's choice at every row of a forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, islice
from typing import Protocol, TypeVar

import numpy as np
import torch

from specwire.core.law import noise as reference
from specwire.core.law.acceptance import (
    Floats,
    Judge,
    RowChoice,
    RowSampling,
    TargetRows,
    judge,
)
from specwire.core.law.noise import MULTIPLIERS, NOISE_BITS, ROUNDS, WEYL, WORD, Key, NoiseStream
from specwire.core.law.sampling import Acceptance, Sampling, TokenScore
from specwire.core.messages import Decision, DraftToken, TokenLogprobs
from specwire.core.model import out_of_memory
from specwire.lm.law.logits import (
    LogitsRow,
    adjusted,
    best_of,
    filtered,
    log_probabilities,
    logprobs,
    scaled,
    surviving,
)

# ----------------------------------------------------------------------------------------------------------------------
# Philox4x32-10 and Gumbel noise: the integers of `specwire.core.law.noise`, for many rows at once.
#
# Torch has no unsigned 64-bit arithmetic, so 32-bit words live in int64: a product of two of them wraps, but its low
# and high words come out right once masked.

# See `loudest`; integers below LOUD have noise below QUIET, also as it is rounded.
QUIET = 5.0
LOUD = np.uint64(math.exp(-math.exp(-QUIET + 1e-6)) * 2**NOISE_BITS)


def uniform_integers(keys: Sequence[Key], ids: torch.Tensor) -> torch.Tensor:
    """52-bit integers, int64 (rows, n), for token ids (rows, n) or (1, n)."""
    first, second = MULTIPLIERS
    low = _noise_column([key.seed & WORD for key in keys], ids.device)
    high = _noise_column([key.seed >> 32 for key in keys], ids.device)
    c0 = torch.full_like(low, int(NoiseStream.GUMBEL))
    c1 = _noise_column([key.choice for key in keys], ids.device)
    c2 = _noise_column([key.position for key in keys], ids.device)
    c3 = ids
    for index in range(ROUNDS):
        k0, k1 = (low + index * WEYL[0]) & WORD, (high + index * WEYL[1]) & WORD
        product0, product1 = c0 * first, c2 * second
        c0, c2 = ((product1 >> 32) ^ (c1 ^ k0)) & WORD, ((product0 >> 32) ^ (c3 ^ k1)) & WORD
        c1, c3 = product1 & WORD, product0 & WORD
    return (c0 << 20) | (c1 >> 12)


def _noise_column(words: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.long, device=device).unsqueeze(1)


def gumbel(keys: Sequence[Key], ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64 (rows, n): -log(-log(u)), u = (integer + 1/2) / 2**52."""
    uniform = uniform_integers(keys, ids).double().add_(0.5).mul_(2.0**-NOISE_BITS)
    return uniform.log_().neg_().log_().neg_()


def loudest(key: Key, scores: reference.Floats) -> int:
    """argmax(scores + noise) on a CPU, the first of several, by NumPy. scores: (vocabulary,) float64.

    Logarithms take longer than all the rest, and few ids can win: those whose score is at most QUIET below what the
    best id comes to, and those whose noise alone is louder than QUIET.
    """
    integers, best = reference.uniform_integers(*key, _all_ids(len(scores))), scores.argmax()
    reached = scores[best] + reference.gumbel_of(integers[best : best + 1].copy())[0]
    able = ((scores >= reached - QUIET) | (integers >= LOUD)).nonzero()[0]
    return int(able[(scores[able] + reference.gumbel_of(integers[able])).argmax()])


@lru_cache(maxsize=4)
def _all_ids(vocabulary: int) -> reference.Ids:
    return np.arange(vocabulary)


# ----------------------------------------------------------------------------------------------------------------------
# The target's choice at every row of a forward: the vectorised twin of `specwire.core.law.acceptance.choose`.


@torch.inference_mode()
def choose(logits: torch.Tensor, rows: Sequence[RowSampling]) -> list[int]:
    """The target's token for each row, a function of the row's logits and its RowSampling alone.

    Args:
        logits: (rows, vocabulary), any float type. A masked id has -inf.

    Rows that are adjusted are so first. Greedy rows: argmax, ties to the lowest id. Coupled rows: argmax(log p + G);
    log p is used without its normaliser, which is the same for all ids of a row. What reaches the host is the tokens.
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"rows: {len(rows)} given for {logits.shape[0]} rows of logits")
    kinds = tuple(zip(_by_kind(rows), (_greedy, _coupled, _coupled_filtered), strict=True))
    for members, pick in kinds:
        if len(members) == len(rows):
            return _ids(pick(_changed(logits, rows), rows))
    chosen = torch.zeros(len(rows), dtype=torch.long, device=logits.device)
    for members, pick in kinds:
        if members:
            part = [rows[member] for member in members]
            chosen[members] = pick(_changed(logits[members], part), part)
    return _ids(chosen)


def _changed(logits: torch.Tensor, rows: Sequence[LogitsRow]) -> torch.Tensor:
    return adjusted(logits, rows) if any(row.adjusted for row in rows) else logits


def _ids(chosen: torch.Tensor) -> list[int]:
    ids: list[int] = chosen.tolist()
    return ids


def _by_kind(rows: Sequence[RowSampling]) -> tuple[list[int], list[int], list[int]]:
    """Indices of the greedy, the unfiltered and the filtered rows."""
    kinds: tuple[list[int], list[int], list[int]] = ([], [], [])
    for index, row in enumerate(rows):
        kinds[0 if row.sampling.temperature == 0.0 else 1 + row.filtered].append(index)
    return kinds


def on_cpu(logits: torch.Tensor) -> bool:
    return logits.device.type == "cpu"


def _greedy(logits: torch.Tensor, _rows: Sequence[RowSampling]) -> torch.Tensor:
    return best_of(logits)


def _coupled(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    if on_cpu(logits):
        return _one_by_one(logits, rows)
    noise = gumbel([row.key for row in rows], torch.arange(logits.shape[1], device=logits.device).unsqueeze(0))
    return best_of(scaled(logits, rows) + noise)


def _coupled_filtered(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Noise is made only for ids that survive: the best `count` of each row, where `count` is the most of any row."""
    if on_cpu(logits):
        return _one_by_one(logits, rows)
    scores = filtered(logits, rows)
    count = int((scores > -torch.inf).sum(dim=1).max())
    best, ids = scores.topk(max(count, 1), dim=1)
    winners = (best + gumbel([row.key for row in rows], ids)).argmax(dim=1, keepdim=True)
    return ids.gather(1, winners).squeeze(1)


def _one_by_one(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """On a CPU work is saved, not calls: nothing is made of ids that cannot be drawn."""
    return torch.tensor([_drawn(scores, row) for scores, row in zip(logits.double().numpy(), rows, strict=True)])


def _drawn(logits: Floats, row: RowSampling) -> int:
    scores = logits / row.sampling.temperature
    if not row.filtered:
        return loudest(row.key, scores)
    ids = surviving(scores, row.sampling)
    return int(ids[(scores[ids] + reference.gumbel(*row.key, ids)).argmax()])


# ----------------------------------------------------------------------------------------------------------------------
# The target's choices for each text of a forward, as a verifier asks for them.

# Rows that are scored together.
SCORED_ROWS = 32


class SampledPart(Protocol):
    """A text's part of a forward: `wanted` rows, behind its end and behind each token of `window`."""

    @property
    def window(self) -> tuple[DraftToken, ...]: ...
    @property
    def wanted(self) -> int: ...
    def rows(self) -> list[RowSampling]:
        """How the token of each row is chosen."""
        ...


P = TypeVar("P", bound=SampledPart)


class LogitsSampler:
    """Chooses from logits (rows, vocabulary)."""

    def choose(self, logits: torch.Tensor, parts: Sequence[P], heard: Callable[[P], bool]) -> list[RowChoice]:
        """The target's choices for each part; the parts' rows stand one behind the other.

        heard: whether a part's constraint has answered; a part whose constraint has not gets no choices.
        What fails for a part is told as its `failure`: all are then chosen for one by one.
        """
        starts = [0, *accumulate(part.wanted for part in parts)][: len(parts)]
        try:
            return self._chosen(logits, starts, parts, heard)
        except Exception as error:
            if out_of_memory(error):
                raise
        return [self._alone(logits, start, part, heard) for start, part in zip(starts, parts, strict=True)]

    def _alone(self, logits: torch.Tensor, start: int, part: P, heard: Callable[[P], bool]) -> RowChoice:
        own = logits[start : start + part.wanted]
        try:
            return self._chosen(own, [0], [part], heard)[0]
        except Exception as error:
            if out_of_memory(error):
                raise
            return RowChoice((), failure=error)

    def _chosen(
        self, logits: torch.Tensor, starts: Sequence[int], parts: Sequence[P], heard: Callable[[P], bool]
    ) -> list[RowChoice]:
        """starts: where the rows of each part begin."""
        rows = [part.rows() if heard(part) else [] for part in parts]
        drawn = any(row.sampling.temperature > 0.0 for each in rows for row in each[:1])
        if drawn and on_cpu(logits):
            triples = zip(starts, rows, parts, strict=True)
            lines = [_as_far_as_right(logits[start:], each, part) for start, each, part in triples]
        else:
            lines = self._all_rows(logits, starts, rows)
        return [
            _choice(logits, start, each, line, part.window)
            for start, each, line, part in zip(starts, rows, lines, parts, strict=True)
        ]

    def _all_rows(
        self, logits: torch.Tensor, starts: Sequence[int], rows: Sequence[Sequence[RowSampling]]
    ) -> list[list[int]]:
        answered = logits
        if sum(map(len, rows)) != len(logits):
            answered = torch.cat([logits[start : start + len(each)] for start, each in zip(starts, rows, strict=True)])
        chosen = iter(choose(answered, [row for each in rows for row in each]))
        return [list(islice(chosen, len(each))) for each in rows]

    def score(self, logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenScore]:
        """A part of the rows at a time: in float64 a large vocabulary's take twice their memory."""
        sampling = RowSampling(0, Sampling(logprobs=top))
        scores: list[TokenScore] = []
        for start in range(0, len(tokens), SCORED_ROWS):
            part, given = logits[start : start + SCORED_ROWS], tokens[start : start + SCORED_ROWS]
            reported = logprobs(part, [sampling] * len(given), given)
            own = part.gather(1, torch.tensor(given, device=part.device).unsqueeze(1))
            ranks = (part >= own).sum(dim=1).tolist()
            scores += map(TokenScore, reported, ranks)
        return scores


def _as_far_as_right(logits: torch.Tensor, rows: Sequence[RowSampling], part: SampledPart) -> list[int]:
    """The tokens of a text's rows, up to the first that is not the window's: what rows behind that say is of no use,
    but under rules that judge the window themselves.
    """
    tokens: list[int] = []
    for index, row in enumerate(rows):
        tokens += choose(logits[index : index + 1], [row])
        guessed = row.sampling.guessed and index < len(part.window)
        if guessed and tokens[-1] != part.window[index].token:
            break
    return tokens


def _choice(
    logits: torch.Tensor, start: int, rows: Sequence[RowSampling], tokens: list[int], window: Sequence[DraftToken]
) -> RowChoice:
    """The choices for a text whose rows of logits begin at `start`."""
    if not rows or (rows[0].sampling.logprobs is None and rows[0].sampling.acceptance is None):
        return RowChoice(tokens)
    sampling, own = rows[0].sampling, logits[start : start + len(rows)]
    report = None if sampling.logprobs is None else _reporter(own, rows)
    told = None if sampling.acceptance is None else _judge(sampling.acceptance, _target(own, rows, tokens), window)
    return RowChoice(tokens, report, told)


def _reporter(
    logits: torch.Tensor, rows: Sequence[RowSampling]
) -> Callable[[Sequence[int]], tuple[TokenLogprobs, ...]]:
    return lambda tokens: logprobs(logits[: len(tokens)], rows[: len(tokens)], tokens)


def _judge(acceptance: Acceptance, target: TargetRows, window: Sequence[DraftToken]) -> Judge:
    def decide(width: int, late: DraftToken | None) -> Decision:
        return judge(acceptance, target, window[:width], late)

    return decide


def _target(logits: torch.Tensor, rows: Sequence[RowSampling], own: Sequence[int]) -> TargetRows:
    def log_p() -> Floats:
        known: Floats = log_probabilities(logits, rows).cpu().numpy()
        return known

    return TargetRows(log_p, [row.sampling for row in rows], rows[0].position, own)
