"""The form that a request demands of its output: a JSON schema, an expression, choices or a grammar.

A `Matcher` says which ids may stand at a place (its implementation is in `specwire.text`). The core only knows that the
answer depends on the output before the place, and that tokens can be taken back.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specwire.core.invalid import InvalidParameter
from specwire.core.text import Stopping

# Most bytes of a constraint's texts together, in UTF-8.
MOST_BYTES = 1 << 16
MOST_CHOICES = 1024
# Of what the form stands behind.
MOST_BEHIND_BYTES = 256

# Whether each id may stand at a place: (vocabulary,).
Mask = npt.NDArray[np.bool_]


class ConstraintKind(StrEnum):
    """Named as on the wire."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICES = "choices"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Constraint:
    """The output, up to its end of sequence, is one of the texts that this describes.

    texts: the schema as JSON, the expression, the grammar (Lark); of choices each. behind: the form begins behind the
    first occurrence of this text, and up to 4 spaces and line feeds; what stands before is free.
    """

    kind: ConstraintKind
    texts: tuple[str, ...]
    behind: str = ""

    def __post_init__(self) -> None:
        most = MOST_CHOICES if self.kind is ConstraintKind.CHOICES else 1
        if not 1 <= len(self.texts) <= most:
            raise self.invalid(f"must be from 1 to {most}, not {len(self.texts)}")
        if not all(self.texts):
            raise self.invalid("must not be empty")
        size = sum(len(self._encoded(text)) for text in self.texts)
        if size > MOST_BYTES:
            raise self.invalid(f"at most {MOST_BYTES} bytes are allowed, not {size}")
        if len(self._encoded(self.behind)) > MOST_BEHIND_BYTES:
            raise InvalidParameter("constraint_behind", f"at most {MOST_BEHIND_BYTES} bytes are allowed")
        if self.kind is ConstraintKind.JSON_SCHEMA:
            self._check_schema()

    @property
    def text(self) -> str:
        """The only one."""
        (text,) = self.texts
        return text

    def invalid(self, message: str) -> InvalidParameter:
        return InvalidParameter(self.kind, message)

    def _encoded(self, text: str) -> bytes:
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            raise self.invalid(f"is not valid Unicode at index {error.start}") from None

    def _check_schema(self) -> None:
        try:
            schema = json.loads(self.text, parse_constant=_no_number)
        except RecursionError:
            raise self.invalid("is nested too deeply") from None
        except ValueError as error:
            raise self.invalid(f"is no JSON: {error}") from None
        if not isinstance(schema, dict):
            raise self.invalid(f"must be a JSON object, not {schema!r:.80}")


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is no number")


class Matcher(Protocol):
    """A constraint behind the output's first `length` tokens. A text that has ended takes no more."""

    @property
    def length(self) -> int: ...

    @property
    def trouble(self) -> str:
        """Why nothing can be taken any more, where the matcher itself failed; else ""."""
        ...

    @property
    def broken(self) -> bool:
        """Whether that is this machine's doing: what computes it is gone, or does not answer."""
        ...

    def take(self, tokens: Sequence[int]) -> int:
        """Go on by as many of `tokens`, from the first, as may stand there; returns how many."""
        ...

    def rollback(self, length: int) -> None:
        """Go back to the output's first `length` tokens; does nothing where it has taken fewer."""
        ...

    def ask(self, window: Sequence[int]) -> None:
        """Begin to compute `masks(window)`, which will be wanted next."""
        ...

    def heard(self, limit_s: float) -> bool:
        """Whether the answer is there; waits for it up to `limit_s` seconds. True also where it will never come."""
        ...

    @property
    def known(self) -> tuple[int, ...] | None:
        """The window whose masks are known already, behind the taken tokens; None where no mask is known."""
        ...

    def masks(self, window: Sequence[int]) -> list[Mask | None]:
        """What may stand behind 0, 1, ... len(window) tokens of `window`, which are not taken.

        None behind a token that may not stand where it does, or that ends the text: no token there will be decided.
        """
        ...


def open_ids(mask: Mask | None, banned: Sequence[int]) -> Mask | None:
    """`mask`, or None where it leaves no id at all, or only `banned` ones.

    Then a token is drawn from all ids, and the matcher refuses it: so a text that cannot go on is noticed.
    """
    if mask is None or not banned:
        return mask if mask is None or mask.any() else None
    left = mask.copy()
    left[list(banned)] = False
    return mask if left.any() else None


def check_constraint(constraint: Constraint | None, stopping: Stopping, eos_ids: Collection[int] = (0,)) -> None:
    """Refuse a constraint whose text could not end. eos_ids: the model's, where it is known."""
    if constraint is None:
        return
    if not eos_ids:
        raise constraint.invalid("needs an end-of-sequence id to end with, which this model does not have")
    if stopping.ignore_eos:
        raise InvalidParameter("ignore_eos", f"contradicts {constraint.kind}, whose text ends with an end of sequence")
