"""JSON in Redis. Anybody who can write there can write anything, so every value is checked."""

from __future__ import annotations

import json
import re
from typing import TypeVar

import msgspec

T = TypeVar("T")

# How msgspec tells where a value stands: `$.models[0].name`.
PLACE = re.compile(r"(.*) - at `\$\.?(.*)`", re.DOTALL)
STEP = re.compile(r"\w+")


def decoded(data: bytes, kind: type[T]) -> T:
    """The value of that type. Fields that it does not have are left out.

    Raises:
        ValueError: names the field and what it holds.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        placed = PLACE.fullmatch(str(error))
        if placed is None:
            raise ValueError(str(error)) from None
        message, field = placed.groups()
        raise ValueError(f"{field}: {message[0].lower()}{message[1:]}{_held(data, field)}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _held(data: bytes, field: str) -> str:
    try:
        value = json.loads(data)
        for step in STEP.findall(field):
            value = value[int(step) if isinstance(value, list) else step]
        return f", not {value!r:.80}"
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""  # what comes behind is no JSON, or the field stands there twice
