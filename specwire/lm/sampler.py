"""From logits to tokens: the target's choice at every row of a forward, and below it a drafter's guess at that.

The first is the vectorised twin of `specwire.core.law`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from specwire.core.law import noise as reference
from specwire.core.law.constraint import Mask
from specwire.core.law.noise import (
    MULTIPLIERS,
    NOISE_BITS,
    ROUNDS,
    WEYL,
    WORD,
    NoiseStream,
)
from specwire.core.law.sampling import Ids, LogprobsOf, Sampling, Seen, rounded
from specwire.core.messages import TokenLogprobs

# ----------------------------------------------------------------------------------------------------------------------
# Philox4x32-10 and Gumbel noise in torch: the integers of `specwire.core.law.noise`, for many rows at once.
#
# Torch has no unsigned 64-bit arithmetic, so 32-bit words live in int64: a product of two of them wraps, but its low
# and high words come out right once masked.

# Rows of full-vocabulary noise that are kept, and the largest vocabulary they are kept for: at most 16 MiB.
KEPT_ROWS = 128
KEPT_VOCABULARY = 16_384

# Up to so many rows a CPU draws the noise of some ids row by row.
ROWS_APART = 12


class Key(NamedTuple):
    """Where one row's noise comes from."""

    seed: int
    choice: int
    position: int


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


# On a CPU the noise of a row is made by NumPy, several times as fast. A position is usually asked for more than once (a
# window behind a refused token is computed again), so the latest rows are kept.


def gumbel_row(key: Key, vocabulary: int) -> reference.Floats:
    """Standard Gumbel noise of all ids on a CPU (vocabulary,), not to be changed."""
    if vocabulary <= KEPT_VOCABULARY:
        return _kept_row(key, vocabulary)
    return reference.gumbel(*key, np.arange(vocabulary))


def _gumbel_at(keys: Sequence[Key], ids: torch.Tensor) -> torch.Tensor:
    """`gumbel` by whichever is faster: for few ids a row takes 25 us in NumPy, any number of rows 300 us in torch."""
    if ids.device.type == "cpu" and len(keys) <= ROWS_APART:
        pairs = zip(keys, ids.numpy(), strict=True)
        return torch.from_numpy(np.stack([reference.gumbel(*key, row) for key, row in pairs]))
    return gumbel(keys, ids)


def gumbel_of(key: Key, ids: reference.Ids, vocabulary: int) -> reference.Floats:
    """Noise of some ids on a CPU: of a row that is kept for the target, which draws at the same positions."""
    if vocabulary <= KEPT_VOCABULARY:
        return _kept_row(key, vocabulary)[ids]
    return reference.gumbel(*key, ids)


def keep_noise(keys: Iterable[Key], vocabulary: int) -> None:
    """Compute rows that the target will draw by, in case somebody draws by them before."""
    if vocabulary <= KEPT_VOCABULARY:
        for key in keys:
            _kept_row(key, vocabulary)


@lru_cache(maxsize=KEPT_ROWS)
def _kept_row(key: Key, vocabulary: int) -> reference.Floats:
    return reference.gumbel(*key, np.arange(vocabulary))


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
# The target's choice at every row of a forward: the vectorised twin of `specwire.core.law.acceptance.choose`.


class RowSampling(NamedTuple):
    """How to choose the token at `position`, whose logits are one row.

    seen, banned, allowed: see `specwire.core.law.sampling.adjusted`.
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
        apart: also to the last bit of the noise: kernels may round its logarithms differently by the place in a batch.

    Rows that are adjusted are so first. Greedy rows: argmax, ties to the lowest id. Coupled rows: argmax(log p + G);
    log p is used without its normaliser, which is the same for all ids of a row. What reaches the host is the tokens.
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"rows: {len(rows)} given for {logits.shape[0]} rows of logits")
    if apart and len(rows) > 1:
        return [choose(logits[index : index + 1], [row])[0] for index, row in enumerate(rows)]
    kinds = tuple(zip(_by_kind(rows), (_greedy, _coupled, _coupled_filtered), strict=True))
    for members, pick in kinds:
        if len(members) == len(rows):
            return _ids(pick(adjusted(logits, rows), rows))
    chosen = torch.zeros(len(rows), dtype=torch.long, device=logits.device)
    for members, pick in kinds:
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
    return best_of(logits)


def best_of(scores: torch.Tensor) -> torch.Tensor:
    """The place of each row's largest element, the first of several.

    On CPUs NumPy's search is vectorised where PyTorch's goes element by element.
    """
    if scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(scores.numpy().argmax(axis=1))
    return scores.argmax(dim=1)


def _coupled(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    vocabulary = logits.shape[1]
    if logits.device.type == "cpu":
        pairs = zip(logits.double().numpy(), rows, strict=True)
        chosen = [(line / row.sampling.temperature + gumbel_row(row.key, vocabulary)).argmax() for line, row in pairs]
        return torch.from_numpy(np.array(chosen))
    noise = gumbel([row.key for row in rows], torch.arange(vocabulary, device=logits.device).unsqueeze(0))
    return best_of(_scaled(logits, rows) + noise)


def _coupled_filtered(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Noise is made only for ids that survive: the best `count` of each row, where `count` is the most of any row."""
    scores = _filtered(logits, rows)
    count = int((scores > -torch.inf).sum(dim=1).max())
    best, ids = scores.topk(max(count, 1), dim=1)
    winners = (best + _gumbel_at([row.key for row in rows], ids)).argmax(dim=1, keepdim=True)
    return ids.gather(1, winners).squeeze(1)


@torch.inference_mode()
def log_probabilities(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Processed log-probabilities, float64 (rows, vocabulary): twin of `core.law.sampling.log_probabilities`."""
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


# ----------------------------------------------------------------------------------------------------------------------
# Log-probabilities of decided tokens: the vectorised twin of `specwire.core.law.sampling.report`.


@torch.inference_mode()
def logprobs(logits: torch.Tensor, rows: Sequence[RowSampling], tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    """One per token: tokens[i] was decided from logits[i]; the rows are of one session, which asked for a report.

    Args:
        logits: (len(tokens), vocabulary).
    """
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


# ----------------------------------------------------------------------------------------------------------------------
# How a drafter or a head picks its next token: as the target would from the same logits, noise included.
#
# Under coupled sampling the target takes argmax(log p + G). A drafter that takes argmax(log q + G) with the same G
# agrees far more often than one that draws on its own (arXiv 2408.07978). What happens here changes acceptance only,
# never a text, so shortcuts are allowed: noise is drawn for the few ids that can win at all.

CANDIDATES = 64
# Ids less likely than this, relative to the likeliest, are left out: a dominant id needs no noise.
LEAST_RELATIVE_PROBABILITY = 1e-4

LEAST_LOG = -math.log(LEAST_RELATIVE_PROBABILITY)

Scores = npt.NDArray[np.float32]


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
        noise = reference.gumbel(sampling.seed, sampling.choice, row.position, ids[found])
        values = scores[found].astype(np.float64) / sampling.temperature + noise
    order = np.argsort(-values, kind="stable")[:most]
    tokens, kept = ids[found[order]].tolist(), values[order]
    return tuple(tokens), tuple((kept - kept[0]).tolist())


def _draw_one(scores: Scores, ids: Ids | None, row: DraftRow, shared: int | None = None) -> tuple[int, float]:
    """From one row's logits; `ids` names the tokens that they are of, None stands for 0, 1, 2, ...

    shared: the vocabulary, where the target draws in this process; see `gumbel_of`.
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
    noise = reference.gumbel(*key, ids) if shared is None else gumbel_of(key, ids, shared)
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
