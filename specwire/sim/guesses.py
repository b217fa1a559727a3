"""What the target decides and what a drafter guesses, without any model: functions of the position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

# Ids from WRONG on are never decided: one for each place among a drafter's best.
WRONG, RANKS = 997, 8
VOCABULARY = WRONG + RANKS
# Tokens of a copy within a text that repeats itself.
COPIED = 24


def target_token(position: int) -> int:
    """The target's token at a position; neighbours differ, so that a text laid at the wrong place is noticed."""
    return position * 7919 % WRONG


@dataclass(frozen=True, slots=True)
class Guesses:
    """right[i]: the drafter's best guess of output token i is the target's; beyond its end it begins again.

    text: what the target decides, by position; beyond its end, and where there is none, see `target_token`.
    ranks[i], scores[i]: in place of `right`, where the target's token i stands among the drafter's best, None for
    nowhere, and the scores of these, falling from 0, in nats; at most RANKS.
    head[k][i]: whether a head has output token i right, as the one k tokens behind the first that it drafts.
    """

    prompt: int
    right: Sequence[bool]
    text: Sequence[int] = ()
    ranks: Sequence[int | None] = ()
    scores: Sequence[Sequence[float]] = ()
    head: Sequence[Sequence[bool]] = ()

    def target(self, position: int) -> int:
        """What the target decides there."""
        return self.text[position] if position < len(self.text) else target_token(position)

    def behind(self, decided: int, path: tuple[int, ...], most: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Up to `most` guesses behind the text of length `decided` and `path`, the best first, and their scores.

        Without ranks there is one guess, which may be right behind any path. With ranks none is behind a path that is
        wrong: it has the scores that were recorded at another position, which the path decides.
        """
        position = decided + len(path)
        if not self.ranks:
            return (self.target(position) if self._is_right(self.right, position) else WRONG,), (0.0,)
        wrong = next((at for at, token in enumerate(path) if token != self.target(decided + at)), None)
        rank, scores = self._recorded(position - self.prompt)
        if wrong is not None:
            rank, scores = None, self._recorded(hash((decided + wrong, path[wrong:])))[1]
        tokens = [WRONG + place for place in range(min(most, len(scores)))]
        if rank is not None and rank < len(tokens):
            tokens[rank] = self.target(position)
        return tuple(tokens), tuple(scores[: len(tokens)])

    def headed(self, position: int, depth: int) -> list[int]:
        """What a head drafts for this position and those behind it."""
        places = enumerate(range(position, position + depth))
        return [self.target(at) if self._is_right(self.head[k], at) else WRONG for k, at in places]

    def _is_right(self, right: Sequence[bool], position: int) -> bool:
        return right[(position - self.prompt) % len(right)]

    def _recorded(self, at: int) -> tuple[int | None, Sequence[float]]:
        at %= len(self.ranks)
        return self.ranks[at], self.scores[at]


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
