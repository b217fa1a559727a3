"""How much of a text others begin with: what decides whose keys and values a new session may start from.

Tokens are compared, not hashes of blocks, and no tree is kept: there are as few texts as slots, equal stretches are
compared in one operation, and one that cannot win is dismissed by one token. So nothing has to be kept in step with
what is evicted, a prefix need not end where a block does, and no collision can be forged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# A shorter prefix is not worth having: that many more rows hardly change what a forward costs.
LEAST_SHARED = 8
STRETCH = 16


@dataclass(frozen=True, slots=True)
class Prefix:
    """A slot that holds the first `length` positions of `tokens`."""

    slot: int
    tokens: list[int]
    length: int

    @property
    def whole(self) -> bool:
        """All of the tokens are there, but for the last one, which is fed when the next is wanted."""
        return self.length >= len(self.tokens) - 1


def common(text: list[int], other: list[int]) -> int:
    """How many tokens the two begin with alike: stretches that double while they are equal, then halve."""
    position, stretch, growing = 0, STRETCH, True
    while position < min(len(text), len(other)):
        if text[position : position + stretch] == other[position : position + stretch]:
            position += stretch
            stretch *= 2 if growing else 1
        elif stretch == 1:
            return position
        else:
            growing, stretch = False, stretch // 2
    return min(position, len(text), len(other))


def longest(text: list[int], prefixes: Iterable[Prefix], least: int = LEAST_SHARED) -> tuple[Prefix, int] | None:
    """The slot that saves `text` most positions, and how many; None below `least`.

    The text's last token is never among them: it has to be fed for what comes next.
    """
    best, saved = None, least - 1
    for prefix in prefixes:
        most = min(prefix.length, len(text) - 1)
        if most <= saved or prefix.tokens[saved] != text[saved]:
            continue
        shared = min(most, common(text, prefix.tokens))
        if shared > saved:
            best, saved = prefix, shared
    return None if best is None else (best, saved)
