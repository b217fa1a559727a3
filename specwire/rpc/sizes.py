"""Sizes of memory on the command line: a number with K, M, G or T, powers of 1024."""

from __future__ import annotations

import re

from specwire.core.sampling import InvalidParameter

SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)([KMGT]?)", re.IGNORECASE)
POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def size_of(field: str, text: str | None) -> int | None:
    """Bytes; None without a text. Raises InvalidParameter of `field`."""
    if text is None:
        return None
    found = SIZE.fullmatch(text)
    size = int(float(found[1]) * 1024 ** POWERS[found[2].upper()]) if found else 0
    if size < 1:
        raise InvalidParameter(field, f"must be a size such as 512M or 1.5G, not {text!r}")
    return size
