"""The target's token for every row of a step's logits, and its log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, islice

import torch

from specwire.core.law.acceptance import Floats, TargetRows, judge
from specwire.core.law.sampling import Acceptance, Sampling
from specwire.core.messages import Decision, DraftToken, TokenLogprobs
from specwire.core.verify.session import Judge
from specwire.lm import RowSampling, choose, log_probabilities, logprobs
from verify_service.engine.batch import Part, RowChoice
from verify_service.engine.messages import TokenScore

# Rows that are scored together.
SCORED_ROWS = 32


class LogitsSampler:
    """A `RowSampler` of logits (rows, vocabulary). apart: see `choose`."""

    def __init__(self, apart: bool) -> None:
        self._apart = apart

    def choose(self, logits: torch.Tensor, parts: Sequence[Part], heard: Callable[[Part], bool]) -> list[RowChoice]:
        rows = [_rows(part) if heard(part) else [] for part in parts]
        starts = _starts(parts)
        whole = logits
        if any(len(each) != part.wanted for each, part in zip(rows, parts, strict=True)):
            whole = torch.cat([logits[start : start + len(each)] for start, each in zip(starts, rows, strict=True)])
        chosen = iter(choose(whole, [row for each in rows for row in each], self._apart))
        return [
            _choice(logits, start, each, list(islice(chosen, len(each))), part)
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


def _rows(part: Part) -> list[RowSampling]:
    """Each row as if the window's tokens before it had been decided."""
    session, wanted = part.held.session, part.wanted
    start = session.position
    if session.plain:
        return [RowSampling(start + index, session.sampling) for index in range(wanted)]
    if not wanted:
        return []
    window = part.tokens
    allowed = session.allowed(window)
    return [
        RowSampling(
            start + index,
            session.sampling_behind(window[:index]),
            session.seen(window[:index]),
            session.ending.banned(start + index),
            allowed[index],
        )
        for index in range(wanted)
    ]


def _choice(logits: torch.Tensor, start: int, rows: Sequence[RowSampling], tokens: list[int], part: Part) -> RowChoice:
    """The choices for a part whose rows of logits begin at `start`."""
    sampling = part.held.session.sampling
    if not rows or (sampling.logprobs is None and sampling.acceptance is None):
        return RowChoice(tokens, None, None)
    own = logits[start : start + len(rows)]
    return RowChoice(tokens, _reporter(own, rows), _judge(own, rows, tokens, part))


def _starts(parts: Sequence[Part]) -> list[int]:
    """Where the rows of each part begin."""
    return [0, *accumulate(part.wanted for part in parts)][: len(parts)]


def _reporter(
    logits: torch.Tensor, rows: Sequence[RowSampling]
) -> Callable[[Sequence[int]], tuple[TokenLogprobs, ...]] | None:
    """The reporter of log-probabilities for one session's rows; None if it wants none."""
    if not rows or rows[0].sampling.logprobs is None:
        return None
    return lambda tokens: logprobs(logits[: len(tokens)], rows[: len(tokens)], tokens)


def _judge(logits: torch.Tensor, rows: Sequence[RowSampling], own: Sequence[int], part: Part) -> Judge | None:
    """The judge of one session's rows; None where its rule looks at no proposal."""
    acceptance = part.held.session.sampling.acceptance
    if not rows or acceptance is None:
        return None
    return _judge_of(acceptance, _target(logits, rows, own), part.window)


def _judge_of(acceptance: Acceptance, target: TargetRows, window: Sequence[DraftToken]) -> Judge:
    def decide(width: int, late: DraftToken | None) -> Decision:
        return judge(acceptance, target, window[:width], late)

    return decide


def _target(logits: torch.Tensor, rows: Sequence[RowSampling], own: Sequence[int]) -> TargetRows:
    def log_p() -> Floats:
        known: Floats = log_probabilities(logits, rows).cpu().numpy()
        return known

    return TargetRows(log_p, [row.sampling for row in rows], rows[0].position, own)
