"""Errors for wrong parameters of a request, the statuses of refusals, and checks of a request's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

# Most parts of one request, in JSON or in a message: strings, lists, objects, fields. Each takes many times its bytes.
MOST_PARTS = 65_536
# Most numbers in lists of one message.
MOST_NUMBERS = 1 << 21
# Most continuations of one text that a call may have scored.
MOST_SCORED = 64
# Most parts that these have in all.
MOST_SCORED_PARTS = 4096
# Most references of a request, and the most tokens of all of them.
MOST_REFERENCES = 64
MOST_REFERENCE_TOKENS = 1 << 20


class InvalidParameter(ValueError):
    """A request's parameter is invalid. `field` is its name on the wire."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ContextExceeded(InvalidParameter):
    """Prompt and output do not fit the context, in the words that clients of OpenAI's API look for."""

    def __init__(self, field: str, message: str, context: int) -> None:
        super().__init__(field, f"{message}: this model's maximum context length is {context} tokens")


class Code(IntEnum):
    """Status codes (google.rpc.Code) that engine and drafter refuse with.

    Non-finite logits abort their session: ABORTED, because neither the caller's request nor the server is at fault and
    the same text would fail again here. A text that its constraint lets neither go on nor end: OUT_OF_RANGE; but
    INVALID_ARGUMENT where the constraint asks for too much time or memory, INTERNAL where what computes it is gone.
    """

    OK = 0
    INVALID_ARGUMENT = 3
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    INTERNAL = 13
    UNAVAILABLE = 14


def check_prediction(tokens: Sequence[int], vocabulary: int, context: int) -> tuple[int, ...]:
    """Check a predicted output. Raises InvalidParameter."""
    if len(tokens) > context:
        raise InvalidParameter("prediction", f"at most {context} tokens are allowed, the context, not {len(tokens)}")
    if max(tokens, default=0) >= vocabulary:
        raise InvalidParameter("prediction", f"token id {max(tokens)} is outside 0..{vocabulary - 1}")
    return tuple(tokens)


def check_length(prompt: str | Sequence[int], context: int, longest: int, field: str = "prompt", room: int = 1) -> None:
    """Refuse a prompt that is too long for the context, without encoding it. Raises ContextExceeded.

    longest: the most bytes of text that one token may stand for. room: tokens that must fit behind it.
    """
    if not isinstance(prompt, str):
        _check_fits(len(prompt), context, field, room)
        return
    size, most = len(prompt.encode()), context * longest
    if size > most:
        raise ContextExceeded(field, f"{size} bytes of text, of at most {most}, do not fit", context)


def check_prompt(tokens: Sequence[int], vocabulary: int, context: int, field: str = "prompt", room: int = 1) -> None:
    """Refuse a prompt that is empty, leaves too little room, or holds an id outside the vocabulary."""
    if not tokens:
        raise InvalidParameter(field, "must not be empty")
    _check_fits(len(tokens), context, field, room)
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < vocabulary:
            raise InvalidParameter(field, f"token id {token} is outside 0..{vocabulary - 1}")


def _check_fits(length: int, context: int, field: str, room: int) -> None:
    if length > context:
        raise ContextExceeded(field, f"{length} tokens do not fit", context)
    if length + room > context:
        raise ContextExceeded(field, f"{length} tokens leave no room for another one", context)
