"""When a text ends: what a request asks for, and what follows from it with the prompt and the model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from specwire.core.invalid import InvalidParameter
from specwire.core.law.constraint import Constraint
from specwire.core.messages import FinishReason

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


def check_constraint(constraint: Constraint | None, stopping: Stopping, eos_ids: Collection[int] = (0,)) -> None:
    """Refuse a constraint whose text could not end. eos_ids: the model's, where it is known."""
    if constraint is None:
        return
    if not eos_ids:
        raise constraint.invalid("needs an end-of-sequence id to end with, which this model does not have")
    if stopping.ignore_eos:
        raise InvalidParameter("ignore_eos", f"contradicts {constraint.kind}, whose text ends with an end of sequence")
