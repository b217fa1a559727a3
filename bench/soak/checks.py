"""Checks of what a session's client was told: is it what the target alone would have written, as asked, and logged?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from bench.soak.jobs import Job, Manner, SoakPair
from bench.soak.reader import Told
from specwire.core.law.noise import gumbel
from specwire.core.law.sampling import Sampling, log_probabilities
from specwire.core.messages import FinishReason, Floats
from specwire.core.text import Ending, Stopping
from specwire.lm import Feed
from specwire.text.output import OutputText


@dataclass(frozen=True, slots=True)
class JudgedMismatch:
    """A token that the target would not have chosen behind the text before it; `gap` is what it lacks to the best."""

    at: int
    expected: int
    got: int
    gap: float


@dataclass(frozen=True, slots=True)
class WantedText:
    """How a session ends by its tokens: how many belong to it, the reason (None: it has not ended), the text."""

    length: int
    reason: FinishReason | None
    text: str


def mismatches(pair: SoakPair, job: Job, tokens: Sequence[int]) -> list[JudgedMismatch]:
    """Every token against the target's choice behind those that were received before it.

    By induction a text without a mismatch is that of plain decoding; behind a near-tie it is a valid continuation.
    """
    if not tokens:
        return []
    text, model = [*job.prompt, *tokens], pair.model
    model.rollback(0, 0)
    rows = model.forward([Feed(0, 0, text[:-1], len(tokens))]).numpy()
    return list(_compare(rows, len(job.prompt), tokens, job.sampling))


def _compare(
    rows: npt.NDArray[np.float32], first: int, tokens: Sequence[int], sampling: Sampling
) -> Iterator[JudgedMismatch]:
    for at, (row, got) in enumerate(zip(rows, tokens, strict=True)):
        scores = scores_of(row, first + at, sampling)
        best = int(np.argmax(scores))
        if best != got:
            yield JudgedMismatch(at, best, got, float(scores[best] - scores[got]))


def scores_of(logits: npt.ArrayLike, position: int, sampling: Sampling) -> Floats:
    """What the choice is the argmax of, (vocabulary,): see `specwire.core.law.acceptance.choose`."""
    if sampling.temperature == 0.0:
        return np.asarray(logits, dtype=np.float64)
    scores = log_probabilities(logits, sampling)
    survivors = np.flatnonzero(scores > -np.inf)
    scores[survivors] += gumbel(sampling.seed, sampling.choice, position, survivors)
    return scores


def wanted(pair: SoakPair, job: Job, tokens: Sequence[int]) -> WantedText:
    """Where these tokens end the session that was asked for, and their text up to there."""
    info, output = pair.model.info, OutputText(pair.tokenizer, job.stop)
    stopping = Stopping(job.length, ignore_eos=job.ignore_eos)
    ending = Ending.of(stopping, len(job.prompt), frozenset(info.eos_ids), info.context)
    length, reason = ending.cut(len(job.prompt), tokens)
    release = output.push(tokens[:length])
    text = release.text + output.finish()
    if output.stopped_at is not None:
        return WantedText(release.kept, FinishReason.STOP_STRING, text)
    return WantedText(length, reason, text)


class CheckKind(StrEnum):
    LOST = "lost"
    REPEATED = "repeated"
    MISMATCH = "mismatch"
    TEXT = "text is not that of the tokens"
    END = "did not end as asked"
    ERROR = "ended with an error"
    LOG = "the log says otherwise"
    READER = "another reader was told otherwise"
    NEAR_TIE = "near-tie"  # counted, and no fault


@dataclass(frozen=True, slots=True)
class SoakFinding:
    session: int
    kind: CheckKind
    detail: str


def check(pair: SoakPair, told: Told) -> list[SoakFinding]:
    return [SoakFinding(told.job.number, kind, detail) for kind, detail in _check(pair, told)]


def _check(pair: SoakPair, told: Told) -> Iterator[tuple[CheckKind, str]]:
    job, tokens = told.job, told.tokens
    if told.lost:
        yield CheckKind.LOST, f"{told.lost} tokens"
    if told.repeated:
        yield CheckKind.REPEATED, f"{told.repeated} tokens"
    if told.error:
        yield (CheckKind.LOST if told.error.startswith("DATA_LOSS") else CheckKind.ERROR), told.error
    for one in mismatches(pair, job, tokens):
        kind = CheckKind.NEAR_TIE if one.gap <= pair.tie else CheckKind.MISMATCH
        yield kind, f"token {one.at}: {one.got} instead of {one.expected}, {one.gap:.2e} behind it"
    yield from _end(job, told, wanted(pair, job, tokens))
    yield from _log(told)
    if told.second_error:
        yield CheckKind.ERROR, f"Watch: {told.second_error}"
    if told.second is not None and not told.error and told.second != tokens:
        yield CheckKind.READER, _difference(told.second, tokens)


def _end(job: Job, told: Told, due: WantedText) -> Iterator[tuple[CheckKind, str]]:
    """Of a session without an error: where its tokens end it, unless it was cancelled or left before."""
    if told.error:
        return
    if due.length < len(told.tokens):
        yield CheckKind.END, f"{len(told.tokens) - due.length} tokens behind the end ({due.reason!r})"
    elif told.end is None and job.manner is not Manner.LEAVE:
        yield CheckKind.END, f"the stream ended without Finished after {len(told.tokens)} tokens"
    elif told.end not in (None, due.reason) and not _may_end_early(told, told.end):
        yield CheckKind.END, f"{told.end!r} after {len(told.tokens)} tokens, not {due.reason!r}"
    complete = told.text == due.text
    if not (complete or (told.end is None and due.text.startswith(told.text))):
        yield CheckKind.TEXT, f"{told.text[-80:]!r} instead of {due.text[-80:]!r}"


def _may_end_early(told: Told, end: FinishReason | None) -> bool:
    """Nobody drives an orphan until it is asked for, which may be past its deadline."""
    if end is FinishReason.DEADLINE:
        return told.orphan
    return told.job.manner is not Manner.READ and end is FinishReason.CANCELLED


def _log(told: Told) -> Iterator[tuple[CheckKind, str]]:
    if told.log_error:
        yield CheckKind.ERROR, f"GetSession: {told.log_error}"
    if told.log is None:
        return
    logged = told.log.tokens[told.log.prompt_tokens :]
    shown = tuple(told.tokens)
    if told.end is None:
        logged = logged[: len(shown)]
    if logged != shown:
        yield CheckKind.LOG, _difference(logged, shown)
    if told.end is not None and told.log.finish_reason is not told.end:
        yield CheckKind.LOG, f"ended by {told.log.finish_reason!r}, not by {told.end!r}"


def _difference(other: Sequence[int], shown: Sequence[int]) -> str:
    equal = next((i for i, (a, b) in enumerate(zip(other, shown, strict=False)) if a != b), min(len(other), len(shown)))
    return f"{len(other)} tokens, of which {equal} are the client's {len(shown)}"
