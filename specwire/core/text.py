"""A text: tokens by absolute position, with a 64-bit hash of every prefix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MASK = (1 << 64) - 1
EMPTY_HASH = 0x243F6A8885A308D3
STEP = 0x9E3779B97F4A7C15


def extend_hash(value: int, token: int) -> int:
    """Hash of a prefix longer by `token`: splitmix64's finaliser over a running sum.

    It tells apart texts that differ by accident (a late proposal, a lost message). It is no defence against forgery and
    needs none: under the exact rules a forged chain can only be refused.
    """
    mixed = (value ^ (token + 1)) + STEP & MASK
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & MASK
    return mixed ^ (mixed >> 31)


def hash_of(tokens: Iterable[int]) -> int:
    value = EMPTY_HASH
    for token in tokens:
        value = extend_hash(value, token)
    return value


class Text:
    """Tokens 0 .. len-1 of prompt + output. Hashes are computed when they are asked for; many texts never need them.

    Invariant: 1 <= len(_hashes) <= len(tokens) + 1, and _hashes[p] is the hash of tokens[:p].
    """

    __slots__ = ("_hashes", "tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = list(tokens)
        self._hashes = [EMPTY_HASH]

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        self.tokens.extend(tokens)

    def truncate(self, length: int) -> None:
        """Drop the tokens at positions >= length; a no-op where the text is not longer."""
        del self.tokens[length:]
        del self._hashes[length + 1 :]

    def hash_at(self, position: int) -> int:
        """Hash of the text before `position`."""
        hashes = self._hashes
        for token in self.tokens[len(hashes) - 1 : position]:
            hashes.append(extend_hash(hashes[-1], token))
        return hashes[position]

    def common_prefix(self, position: int, tokens: Sequence[int]) -> int:
        """How many of `tokens`, laid at `position`, equal what the text holds there."""
        for index, token in enumerate(tokens):
            if position + index >= len(self.tokens) or self.tokens[position + index] != token:
                return index
        return len(tokens)
