"""Do all rows say what plain decoding says, token for token? Where one does not: is it a near-tie of the target?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.harness.child import BenchChild
from bench.harness.runs import Sample, of_row

# In float32, scores of one token computed alone and in a longer forward differ by a few 1e-6.
FLOAT32_TIE = 1e-4
BFLOAT16_BITS = 7
ASK_LIMIT = 600.0


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first difference of a text from the reference; `at` counts from the prompt's end."""

    row: str
    prompt: int
    at: int
    expected: int
    got: int


@dataclass(frozen=True, slots=True)
class TextScores:
    """What the target says after a text, cache-less and in float32: its two best tokens, and the two in question."""

    top: tuple[int, int]
    top_scores: tuple[float, float]
    scores: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Judged:
    """A mismatch, the target's scores there, and whether equal arithmetic could have gone either way."""

    mismatch: Mismatch
    gap: float
    scores: TextScores
    near_tie: bool


def mismatches(samples: Sequence[Sample], reference: str) -> list[Mismatch]:
    """Each different first difference of each row and prompt from the reference row's first run on that prompt."""
    expected: dict[int, tuple[int, ...]] = {}
    for sample in of_row(samples, reference):
        expected.setdefault(sample.prompt, sample.run.tokens)
    found = (_first(sample, expected[sample.prompt]) for sample in samples)
    return sorted({one for one in found if one is not None}, key=lambda one: (one.row, one.prompt, one.at))


def _first(sample: Sample, expected: Sequence[int]) -> Mismatch | None:
    for at, (wanted, got) in enumerate(zip(expected, sample.run.tokens, strict=True)):
        if wanted != got:
            return Mismatch(sample.row, sample.prompt, at, wanted, got)
    return None


def judge(
    found: Sequence[Mismatch], scores: Callable[[Mismatch], TextScores], tolerance: Callable[[float], float]
) -> Iterator[Judged]:
    """A near-tie: both tokens score within the tolerance of the best one."""
    for mismatch in found:
        known = scores(mismatch)
        best, second = known.top_scores
        near = all(best - score <= tolerance(best) for score in known.scores)
        yield Judged(mismatch, best - second, known, near)


def tolerance(dtype: str) -> Callable[[float], float]:
    """How far apart two scores may be and still count as equal, given the best one."""
    return _two_bfloat16_ulps if dtype == "bfloat16" else lambda best: FLOAT32_TIE


def _two_bfloat16_ulps(best: float) -> float:
    exponent = math.frexp(best)[1] - 1 if best else 0
    return 2 * math.ldexp(1.0, exponent - BFLOAT16_BITS)


def scores_at(
    peer: BenchChild, prompts: Sequence[Sequence[int]], samples: Sequence[Sample], reference: str
) -> Callable[[Mismatch], TextScores]:
    """How to ask the target about a mismatch with the row `reference`."""
    expected = {sample.prompt: sample.run.tokens for sample in reversed(of_row(samples, reference))}

    def ask(where: Mismatch) -> TextScores:
        text = [*prompts[where.prompt], *expected[where.prompt][: where.at]]
        answer = peer.ask({"do": "scores", "text": text, "of": [where.expected, where.got]}, ASK_LIMIT)
        return TextScores(tuple(answer["top"]), tuple(answer["top_scores"]), tuple(answer["scores"]))

    return ask
