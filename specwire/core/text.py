"""A text: tokens by absolute position, a 64-bit hash of every prefix, and when it ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specwire.core.invalid import InvalidParameter
from specwire.core.messages import FinishReason

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


# ----------------------------------------------------------------------------------------------------------------------
# When a text ends: what a request asks for, and what follows from it with the prompt and the model.

MOST_STOP_IDS = 1024


@dataclass(frozen=True, slots=True)
class Stopping:
    """max_tokens and min_tokens count the tokens decided after the prompt.

    Before min_tokens no id that would end the text is drawn. Stop strings, which are found in the text, end it all the
    same.
    """

    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens >= 1 << 32:
            raise InvalidParameter("max_tokens", f"must be a number of 32 bits, not {self.max_tokens}")
        if self.max_tokens < 1:
            raise InvalidParameter("max_tokens", f"must be at least 1, not {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidParameter(
                "min_tokens", f"must be from 0 to max_tokens, which is {self.max_tokens}, not {self.min_tokens}"
            )
        if len(self.stop_ids) > MOST_STOP_IDS:
            raise InvalidParameter("stop_ids", f"at most {MOST_STOP_IDS} are allowed, not {len(self.stop_ids)}")
        for token in self.stop_ids:
            if not 0 <= token < 1 << 32:
                raise InvalidParameter("stop_ids", f"must be ids from 0 to {(1 << 32) - 1}, not {token}")


@dataclass(frozen=True, slots=True)
class Ending:
    """Where a session's text ends: `end` is its greatest length in tokens, prompt included.

    Before `least`, likewise a length, no id that would end it is drawn.
    """

    end: int
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    least: int = 0

    @classmethod
    def of(cls, stopping: Stopping, prompt_length: int, eos_ids: frozenset[int], context: int) -> Ending:
        end = min(prompt_length + stopping.max_tokens, context)
        least = prompt_length + stopping.min_tokens if stopping.min_tokens else 0
        return cls(end, frozenset() if stopping.ignore_eos else eos_ids, stopping.stop_ids, least)

    def banned(self, position: int) -> tuple[int, ...]:
        """Ids that may not be drawn at `position`."""
        return tuple(self.eos_ids | self.stop_ids) if position < self.least else ()

    def cut(self, position: int, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """How many of `tokens`, decided at `position`, belong to the text, and why it ends there if it does."""
        for index, token in enumerate(tokens):
            if token in self.eos_ids:
                return index + 1, FinishReason.EOS
            if token in self.stop_ids:
                return index + 1, FinishReason.STOP_ID
            if position + index + 1 >= self.end:
                return index + 1, FinishReason.LENGTH
        return len(tokens), None


def check_min_tokens(stopping: Stopping, eos_ids: frozenset[int], vocabulary: int) -> None:
    """Refuse min_tokens where every id would end the text, so that none could be drawn."""
    ending = stopping.stop_ids if stopping.ignore_eos else stopping.stop_ids | eos_ids
    if stopping.min_tokens and len(ending) >= vocabulary:
        raise InvalidParameter("min_tokens", f"{stopping.min_tokens}: each of the {vocabulary} ids ends the text")
