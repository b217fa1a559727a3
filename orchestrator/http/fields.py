"""A request's JSON object: each field is taken by name and type, and what nobody took is refused."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any

from specwire.core.sampling import InvalidParameter

# Characters of a value that an error shows.
SHOWN = 80
SHORT = reprlib.Repr()
SHORT.maxlevel, SHORT.maxlist, SHORT.maxdict = 3, SHOWN // 2, SHOWN // 4
SHORT.maxstring = SHORT.maxlong = SHORT.maxother = 2 * SHOWN


def shown(value: object) -> str:
    """As Python writes it, and no more of it than is told."""
    text = SHORT.repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


class Fields:
    """An object of a request. Null stands for absent, as clients send it.

    path: of this object in the request, for errors: "stream_options.".
    """

    def __init__(self, values: dict[str, Any], path: str = "") -> None:
        self._left = {name: value for name, value in values.items() if value is not None}
        self._path = path

    def invalid(self, name: str, message: str) -> InvalidParameter:
        return InvalidParameter(self._path + name, message)

    def _wrong(self, name: str, wanted: str, value: object) -> InvalidParameter:
        return self.invalid(name, f"must be {wanted}, not {shown(value)}")

    def take(self, name: str) -> Any:
        """The value, None where there is none; its type is the caller's to check."""
        return self._left.pop(name, None)

    def names(self) -> list[str]:
        """Of what is left."""
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
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return default if value is None else value

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

    def texts(self, name: str) -> list[str]:
        """A string or a list of them."""
        value = self.take(name)
        if value is None:
            return []
        several = [value] if isinstance(value, str) else value
        if not isinstance(several, list) or not all(isinstance(each, str) for each in several):
            raise self._wrong(name, "a string or a list of strings", value)
        return several

    def ids(self, name: str) -> list[int]:
        value = self.take(name)
        if value is None:
            return []
        if not is_ids(value):
            raise self._wrong(name, "a list of token ids", value)
        return list(value)

    def inner(self, name: str) -> Fields | None:
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, "an object", value)
        return Fields(value, f"{self._path}{name}.")

    def fixed(self, name: str, *allowed: object) -> None:
        """A field that may only say what is the case here anyway."""
        value = self.take(name)
        if value is not None and value not in allowed:
            raise self.invalid(name, f"{shown(value)} is not served")

    def end(self) -> None:
        """Nothing may be left: what is not known is refused, never ignored."""
        if self._left:
            name = next(iter(self._left))
            raise self.invalid(name, "is not a field of this request, or is not served")


def is_ids(value: object) -> bool:
    """Whether it is a list of numbers that may be token ids; an empty list is one."""
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 32 for each in value)
