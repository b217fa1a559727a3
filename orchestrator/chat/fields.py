"""A request's JSON: its bounds, and its fields, each of which is taken by name and type or refused by name."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NoReturn

from orchestrator.admission import MOST_DEPTH
from specwire.core.invalid import MOST_PARTS, InvalidParameter
from specwire.core.law.constraint import Constraint, ConstraintKind

# ----------------------------------------------------------------------------------------------------------------------
# What values of one request may come to.

STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
NO_BRACKETS = bytes(byte for byte in range(256) if byte not in STEPS)


class JsonBounds:
    """What the texts of one request may come to as JSON: strings, lists and objects in all, and the depth of each.

    They are counted before any value is made. Invariant: what was counted so far is at most MOST_PARTS.
    """

    def __init__(self) -> None:
        self._parts = 0

    def check(self, text: bytes, field: str, name: str = "") -> None:
        """Raises InvalidParameter of `field`. name: of what is within it.

        With escapes removed, every second piece between quotes lies outside of strings, up to the first place that is
        no JSON.
        """
        plain = text.replace(rb"\\", b"").replace(rb"\"", b"")
        strings = plain.count(b'"') // 2
        brackets = b"".join(plain.split(b'"')[::2]).translate(None, NO_BRACKETS) if strings <= MOST_PARTS else b""
        self._parts += strings + brackets.count(b"[") + brackets.count(b"{")
        if self._parts > MOST_PARTS:
            raise _beyond(field, name, f"has more than {MOST_PARTS} strings, lists and objects")
        if max(accumulate(map(STEPS.__getitem__, brackets)), default=0) > MOST_DEPTH:
            raise _beyond(field, name, f"is nested too deeply: more than {MOST_DEPTH} lists and objects")


def _beyond(field: str, name: str, message: str) -> InvalidParameter:
    return InvalidParameter(field, f"{name} {message}" if name else message)


def no_number(name: str) -> NoReturn:
    """For `json.loads`, which would take NaN and infinities."""
    raise ValueError(f"{name} is no number of JSON")


# ----------------------------------------------------------------------------------------------------------------------
# A request's JSON object: each field is taken by name and type; fields that were not taken are refused.

# Characters of a value that an error shows.
SHOWN = 80
SHORT = reprlib.Repr()
SHORT.maxlevel, SHORT.maxlist, SHORT.maxdict = 3, SHOWN // 2, SHOWN // 4
SHORT.maxstring = SHORT.maxlong = SHORT.maxother = 2 * SHOWN


def shown(value: object) -> str:
    """The value as Python writes it, shortened for an error message."""
    text = SHORT.repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidParameter(field, f"at most {most} are allowed, not {count}")


class Fields:
    """An object of a request. Null counts as absent, because clients send it so.

    path: of this object in the request, for errors: "stream_options.".
    """

    def __init__(self, values: dict[str, Any], path: str = "") -> None:
        self._left = {name: value for name, value in values.items() if value is not None}
        self.path = path

    def invalid(self, name: str, message: str) -> InvalidParameter:
        return InvalidParameter(self.path + name, message)

    def _wrong(self, name: str, wanted: str, value: object) -> InvalidParameter:
        return self.invalid(name, f"must be {wanted}, not {shown(value)}")

    def take(self, name: str) -> Any:
        """The value, None where there is none; its type is the caller's to check."""
        return self._left.pop(name, None)

    def names(self) -> list[str]:
        """Names of the fields that are left."""
        return list(self._left)

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def choice(self, name: str, choices: Iterable[str]) -> str | None:
        value = self.text(name)
        if value is not None and value not in choices:
            raise self._wrong(name, f"one of {', '.join(choices)}", value)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.flag_if_any(name)
        return default if value is None else value

    def flag_if_any(self, name: str) -> bool | None:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def whole(self, name: str, least: int = 0, most: int = (1 << 32) - 1) -> int | None:
        """A whole number; 1.0 is one, too: some clients have only one type for numbers."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._wrong(name, f"a whole number from {least} to {most}", value)
        return value

    def number(self, name: str) -> float | None:
        value = self.take(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self._wrong(name, "a number", value)
        if isinstance(value, int) and abs(value) > 1 << 53:
            raise self._wrong(name, "a number of ordinary size", value)
        return None if value is None else float(value)

    def texts(self, name: str, most: int) -> list[str]:
        """A string or a list of at most so many; they are counted before they are walked."""
        value = self.take(name)
        if value is None:
            return []
        several = [value] if isinstance(value, str) else value
        check_count(self.path + name, len(several) if isinstance(several, list) else 0, most)
        if not isinstance(several, list) or not all(isinstance(each, str) for each in several):
            raise self._wrong(name, "a string or a list of strings", value)
        return several

    def ids(self, name: str, most: int) -> list[int]:
        """Likewise."""
        value = self.take(name)
        if value is None:
            return []
        check_count(self.path + name, len(value) if isinstance(value, list) else 0, most)
        if not is_ids(value):
            raise self._wrong(name, "a list of token ids", value)
        return list(value)

    def inner(self, name: str) -> Fields | None:
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, "an object", value)
        return Fields(value, f"{self.path}{name}.")

    def fixed(self, name: str, *allowed: object) -> None:
        """Take a field that may only have the value that holds here anyway."""
        value = self.take(name)
        if value is not None and value not in allowed:
            raise self.invalid(name, f"{shown(value)} is not served")

    def end(self) -> None:
        """Refuse fields that are left: an unknown field is never ignored."""
        if self._left:
            name = next(iter(self._left))
            raise self.invalid(name, "is not a field of this request, or is not served")


def is_ids(value: object) -> bool:
    """Whether it is a list of numbers that may be token ids; an empty list is one."""
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 32 for each in value)


def made_constraint(name: str, kind: ConstraintKind, texts: list[str]) -> Constraint:
    """name: of the field that a refusal names."""
    try:
        return Constraint(kind, tuple(texts))
    except InvalidParameter as error:
        raise InvalidParameter(name, str(error).removeprefix(f"{kind}: ")) from None
