"""What the target decides and what a drafter guesses, without any model: functions of the position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

WRONG = 997
VOCABULARY = WRONG + 1
# Tokens of a copy within a text that repeats itself.
COPIED = 24


def target_token(position: int) -> int:
    """The target's token at a position; neighbours differ, so that a text laid at the wrong place is noticed."""
    return position * 7919 % WRONG


@dataclass(frozen=True, slots=True)
class Guesses:
    """right[i]: the drafter's guess of output token i is the target's; beyond its end it begins again.

    confidence[i]: the drafter's own probability of that guess, told where it is asked for.
    text: what the target decides, by position; beyond its end, and where there is none, see `target_token`.
    """

    prompt: int
    right: Sequence[bool]
    confidence: Sequence[float]
    text: Sequence[int] = ()

    def target(self, position: int) -> int:
        """What the target decides there."""
        return self.text[position] if position < len(self.text) else target_token(position)

    def token(self, position: int) -> int:
        """The drafter's guess, whatever text it made it from."""
        return self.target(position) if self.right[(position - self.prompt) % len(self.right)] else WRONG

    def confidence_at(self, position: int) -> float:
        return self.confidence[(position - self.prompt) % len(self.confidence)]


@lru_cache(maxsize=256)
def repeating_text(repeats: float, length: int, seed: int) -> tuple[int, ...]:
    """A text of which this share is copied from before it, COPIED tokens at a time."""
    random, text = Random(seed), [target_token(position) for position in range(COPIED)]
    while len(text) < length:
        begin = random.randrange(len(text) - COPIED + 1)
        fresh = [target_token(position) for position in range(len(text), len(text) + COPIED)]
        text += text[begin : begin + COPIED] if random.random() < repeats else fresh
    return tuple(text[:length])


@lru_cache(maxsize=1024)
def drawn_trace(acceptance: float, length: int, seed: int) -> tuple[bool, ...]:
    """`length` independent guesses, each right with probability `acceptance`."""
    random = Random(seed)
    return tuple(random.random() < acceptance for _ in range(length))
