"""A step's batch: each session's part of it, and what the target says at its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

import torch

from specwire.core.law.acceptance import Floats, TargetRows, judge
from specwire.core.law.sampling import Acceptance
from specwire.core.messages import Decision, Draft, SourceKind, TokenLogprobs
from specwire.core.policy.windows import Share
from specwire.core.verify.session import Judge
from specwire.lm import RowSampling, choose, log_probabilities, logprobs
from verify_service.engine.sessions import Held


class Part(NamedTuple):
    """A session's `share` of a step.

    tokens: of the window. source: whose chain it was taken from, if of one. wanted: rows of logits: one more than the
    window, none before the prompt's end.
    """

    share: Share
    held: Held
    window: tuple[Draft, ...]
    tokens: tuple[int, ...]
    source: int | None
    wanted: int

    @classmethod
    def of(cls, share: Share, held: Held) -> Part:
        session = held.session
        if not share.window:
            return cls(share, held, (), (), None, 1 if share.decides else 0)
        if share.kind is SourceKind.DRAFTER:
            window = session.drafts(share.window)
        else:
            window = tuple(map(Draft, session.window(share.window, share.kind)))
        window = session.foreseen(window)
        tokens = tuple([draft.token for draft in window])
        wanted = len(window) + 1 if share.decides else 0
        return cls(share, held, window, tokens, session.source if window else None, wanted)

    def ask(self) -> None:
        """What its rows need to know from elsewhere, before the forward."""
        if self.wanted:
            self.held.session.ask(self.tokens)

    def rows(self) -> list[RowSampling]:
        """Each as if the tokens of the window before it had been decided."""
        session, wanted = self.held.session, self.wanted
        start = session.position
        if session.plain:
            return [RowSampling(start + index, session.sampling) for index in range(wanted)]
        if not wanted:
            return []
        window = self.tokens
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


class RowChoice(NamedTuple):
    """The target's token for each row of a part.

    report: gives the log-probabilities of those that are decided. judge: decides the window where its rule looks at it.
    """

    tokens: Sequence[int]
    report: Callable[[Sequence[int]], tuple[TokenLogprobs, ...]] | None
    judge: Judge | None


def choices(
    logits: torch.Tensor, parts: Sequence[Part], apart: bool = False, heard: Callable[[Part], bool] = lambda _: True
) -> list[RowChoice]:
    """What the target says to each part, whose rows of logits (rows, vocabulary) stand one behind the other.

    heard: whether it is known what a part's constraint allows; nothing is said to one that it is not known of.
    apart: see `choose`.
    """
    rows = [part.rows() if heard(part) else [] for part in parts]
    starts = _starts(parts)
    whole = logits
    if any(len(each) != part.wanted for each, part in zip(rows, parts, strict=True)):
        whole = torch.cat([logits[start : start + len(each)] for start, each in zip(starts, rows, strict=True)])
    chosen = iter(choose(whole, [row for each in rows for row in each], apart))
    return [
        _choice(logits, start, each, list(islice(chosen, len(each))), part)
        for start, each, part in zip(starts, rows, parts, strict=True)
    ]


def _choice(logits: torch.Tensor, start: int, rows: Sequence[RowSampling], tokens: list[int], part: Part) -> RowChoice:
    """What was chosen for a part whose rows of logits begin at `start`."""
    sampling = part.held.session.sampling
    if not rows or (sampling.logprobs is None and sampling.acceptance is None):
        return RowChoice(tokens, None, None)
    own = logits[start : start + len(rows)]
    return RowChoice(tokens, _reporter(own, rows), _judge(own, rows, tokens, part))


def _starts(parts: Sequence[Part]) -> list[int]:
    """Where the rows of each begin."""
    return [0, *accumulate(part.wanted for part in parts)][: len(parts)]


def _reporter(
    logits: torch.Tensor, rows: Sequence[RowSampling]
) -> Callable[[Sequence[int]], tuple[TokenLogprobs, ...]] | None:
    """What reports log-probabilities for the rows of one session; None if it wants no report."""
    if not rows or rows[0].sampling.logprobs is None:
        return None
    return lambda tokens: logprobs(logits[: len(tokens)], rows[: len(tokens)], tokens)


def _judge(logits: torch.Tensor, rows: Sequence[RowSampling], own: Sequence[int], part: Part) -> Judge | None:
    """What judges the rows of one session; None where its rule looks at no proposal."""
    acceptance = part.held.session.sampling.acceptance
    if not rows or acceptance is None:
        return None
    return _judge_of(acceptance, _target(logits, rows, own), part.window)


def _judge_of(acceptance: Acceptance, target: TargetRows, window: Sequence[Draft]) -> Judge:
    def decide(width: int, late: Draft | None) -> Decision:
        return judge(acceptance, target, window[:width], late)

    return decide


def _target(logits: torch.Tensor, rows: Sequence[RowSampling], own: Sequence[int]) -> TargetRows:
    def log_p() -> Floats:
        known: Floats = log_probabilities(logits, rows).cpu().numpy()
        return known

    return TargetRows(log_p, [row.sampling for row in rows], rows[0].position, own)
