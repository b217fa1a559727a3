"""Is a text the one that the target alone would have written, and does it end where it was asked to?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.soak.jobs import Job
from bench.soak.pairs import SoakPair
from specwire.core.law.noise import gumbel
from specwire.core.law.sampling import Sampling, log_probabilities
from specwire.core.messages import FinishReason, Floats
from specwire.core.text import Ending, Stopping
from specwire.lm import Feed
from specwire.text import OutputText


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
