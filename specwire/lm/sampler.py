"""From logits to tokens: the target's choice at every row of a forward, and below it a drafter's guess at that."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, islice
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from specwire.core.draft import DraftRow, Drawn
from specwire.core.law import noise as reference
from specwire.core.law.acceptance import (
    Floats,
    Judge,
    RowChoice,
    RowSampling,
    TargetRows,
    draw_quantised,
    judge,
    quantise,
)
from specwire.core.law.noise import Key
from specwire.core.law.sampling import Acceptance, Ids, Sampling, TokenScore
from specwire.core.messages import MOST_KEPT, Decision, DraftToken, TokenLogprobs, Weights
from specwire.lm.logits import LogitsRow, adjusted, filtered, log_probabilities, logprobs, scaled
from specwire.lm.noise import gumbel, gumbel_at, gumbel_of, gumbel_row
from specwire.text.vocabulary_map import MOST_VOCABULARIES, VocabularyMap

# ----------------------------------------------------------------------------------------------------------------------
# The target's choice at every row of a forward: the vectorised twin of `specwire.core.law.acceptance.choose`.


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
    return best_of(scaled(logits, rows) + noise)


def _coupled_filtered(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Noise is made only for ids that survive: the best `count` of each row, where `count` is the most of any row."""
    scores = filtered(logits, rows)
    count = int((scores > -torch.inf).sum(dim=1).max())
    best, ids = scores.topk(max(count, 1), dim=1)
    winners = (best + gumbel_at([row.key for row in rows], ids)).argmax(dim=1, keepdim=True)
    return ids.gather(1, winners).squeeze(1)


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
    """Chooses from logits (rows, vocabulary). apart: see `choose`."""

    def __init__(self, apart: bool) -> None:
        self._apart = apart

    def choose(self, logits: torch.Tensor, parts: Sequence[P], heard: Callable[[P], bool]) -> list[RowChoice]:
        """The target's choices for each part; the parts' rows stand one behind the other.

        heard: whether a part's constraint has answered; a part whose constraint has not gets no choices.
        """
        rows = [part.rows() if heard(part) else [] for part in parts]
        starts = [0, *accumulate(part.wanted for part in parts)][: len(parts)]
        answered = logits
        if any(len(each) != part.wanted for each, part in zip(rows, parts, strict=True)):
            answered = torch.cat([logits[start : start + len(each)] for start, each in zip(starts, rows, strict=True)])
        chosen = iter(choose(answered, [row for each in rows for row in each], self._apart))
        return [
            _choice(logits, start, each, list(islice(chosen, len(each))), part.window)
            for start, each, part in zip(starts, rows, parts, strict=True)
        ]

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


def _choice(
    logits: torch.Tensor, start: int, rows: Sequence[RowSampling], tokens: list[int], window: Sequence[DraftToken]
) -> RowChoice:
    """The choices for a text whose rows of logits begin at `start`."""
    if not rows or (rows[0].sampling.logprobs is None and rows[0].sampling.acceptance is None):
        return RowChoice(tokens, None, None)
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
    return [Drawn((token,), confidence) for token, confidence in draw(logits, rows)]


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
