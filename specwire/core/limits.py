"""When a text ends, and how much a request may ask for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import ceil

from specwire.core.invalid import ContextExceeded, InvalidParameter
from specwire.core.law.constraint import Constraint
from specwire.core.messages import MOST_WINDOW, FinishReason

# ----------------------------------------------------------------------------------------------------------------------
# What ends a session from the verifier's side, and bounds on what a request may ask.

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


def check_prediction(tokens: Sequence[int], vocabulary: int, context: int) -> tuple[int, ...]:
    """What a client says the output may look like. Raises InvalidParameter."""
    if len(tokens) > context:
        raise InvalidParameter("prediction", f"at most {context} tokens are allowed, the context, not {len(tokens)}")
    for token in tokens:
        if token >= vocabulary:
            raise InvalidParameter("prediction", f"token id {token} is outside 0..{vocabulary - 1}")
    return tuple(tokens)


def check_prompt(tokens: Sequence[int], vocabulary: int, context: int) -> None:
    """Refuse a prompt that is empty, leaves no room for a token, or holds an id outside the vocabulary."""
    if not tokens:
        raise InvalidParameter("prompt", "must not be empty")
    if len(tokens) >= context:
        raise ContextExceeded("prompt", f"{len(tokens)} tokens leave no room for another one", context)
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise InvalidParameter("prompt", f"token id {token} is outside 0..{vocabulary - 1}")


# ----------------------------------------------------------------------------------------------------------------------
# How many tokens a verifier may decide beyond what is durable and taken by the client.

# Beyond this a fast target far away pauses for credit: what is decided for a client that has gone is bounded by it.
MOST_BUFFER = 1024


def buffer_for(round_trip_us: float, step_us: float, least: int) -> int:
    """The least buffer with which a verifier `round_trip_us` away never waits for credit; a plain step takes `step_us`.

    What the largest steps decide during a round trip, twice: credit is raised when half of the buffer is used.
    """
    if not step_us > 0:
        raise ValueError(f"step_us: must be positive, not {step_us}")
    decided = ceil(round_trip_us / step_us * (MOST_WINDOW + 1))
    return max(least, min(MOST_BUFFER, 2 * decided))
