"""What the target decides and what a drafter guesses, without any model: functions of the position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

WRONG = 997
VOCABULARY = WRONG + 1


def target_token(position: int) -> int:
    """The target's token at a position; neighbours differ, so that a text laid at the wrong place is noticed."""
    return position * 7919 % WRONG


@dataclass(frozen=True, slots=True)
class Guesses:
    """right[i]: the drafter's guess of output token i is the target's; beyond its end it begins again.

    confidence[i]: the drafter's own probability of that guess, told where it is asked for.
    """

    prompt: int
    right: Sequence[bool]
    confidence: Sequence[float]

    def token(self, position: int) -> int:
        """The drafter's guess, whatever text it made it from."""
        return target_token(position) if self.right[(position - self.prompt) % len(self.right)] else WRONG

    def confidence_at(self, position: int) -> float:
        return self.confidence[(position - self.prompt) % len(self.confidence)]


@lru_cache(maxsize=1024)
def drawn_trace(acceptance: float, length: int, seed: int) -> tuple[bool, ...]:
    """`length` independent guesses, each right with probability `acceptance`."""
    random = Random(seed)
    return tuple(random.random() < acceptance for _ in range(length))
