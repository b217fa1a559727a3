"""Where two texts of the same target part: a near-tie of the target's scores, or a defect.

The logits of a position depend a little on how many positions share a forward. Where the best scores are closer than
that, either token is the target's own choice (ARCHITECTURE.md section 9).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FLOAT32_GAP = 1e-4
BFLOAT16_ULPS = 2
BFLOAT16_FRACTION_BITS = 7


@dataclass(frozen=True, slots=True)
class Parting:
    """Two texts part at `position`: their tokens there, and how far below the best score each token's score is."""

    position: int
    tokens: tuple[int, int]
    gaps: tuple[float, float]
    tolerance: float

    @property
    def near_tie(self) -> bool:
        return max(self.gaps) <= self.tolerance

    def __str__(self) -> str:
        kind = "a near-tie" if self.near_tie else "NO near-tie"
        below = f"{self.gaps[0]:.2g} and {self.gaps[1]:.2g} below the best score, tolerance {self.tolerance:.2g}"
        return f"position {self.position}: tokens {self.tokens[0]} and {self.tokens[1]}, {below}: {kind}"


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first index at which the sequences differ; None if they are equal."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def tolerance(dtype: str, top_score: float) -> float:
    """Return how close to the best score another may be to count as tied: ulps of that score in bfloat16."""
    if dtype == "float32":
        return FLOAT32_GAP
    exponent = math.floor(math.log2(abs(top_score))) if top_score else -126
    return float(BFLOAT16_ULPS * 2.0 ** (exponent - BFLOAT16_FRACTION_BITS))


def examine(model: str, dtype: str, text: Sequence[int], tokens: tuple[int, int]) -> Parting:
    """Return how the target scores two tokens after `text`, by a forward of its own in this process."""
    # torch comes with it; needed only when texts differ
    from specwire.lm import Feed, load_model

    scores = load_model(model, slots=1, dtype=dtype).forward([Feed(0, 0, list(text), 1)])[0]
    top = float(scores.max())
    gaps = (top - float(scores[tokens[0]]), top - float(scores[tokens[1]]))
    return Parting(len(text), tokens, gaps, tolerance(dtype, top))
