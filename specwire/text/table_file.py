"""Files of tables of n-grams: what is looked up in one is read when it is, the rest stays where it is.

A line that names the format, the length of a header (8 bytes, little-endian), the header as JSON (`tokenizer`, and for
each array its kind and length), and the arrays, each at a multiple of 64 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specwire.core.invalid import InvalidParameter
from specwire.core.verify.table import LEAST_ORDER, LEVEL_KINDS, MOST_ORDER, NgramLevel, NgramTable
from specwire.files import replaced

MAGIC = b"specwire table 1\n"
LENGTH_BYTES = 8
MOST_HEADER = 1 << 16
ALIGNMENT = 64


def save_table(table: NgramTable, path: Path) -> None:
    """Who has an older file of this name mapped keeps it. Raises OSError."""
    arrays = [each for level in table.levels for each in level.arrays]
    told = {"tokenizer": table.tokenizer, "arrays": [[each.dtype.str, len(each)] for each in arrays]}
    header = json.dumps(told).encode()
    with replaced(path) as beside, beside.open("wb") as file:
        file.write(MAGIC + len(header).to_bytes(LENGTH_BYTES, "little") + header)
        for each in arrays:
            file.write(bytes(-file.tell() % ALIGNMENT))
            file.write(each.tobytes())


def load_table(path: Path) -> NgramTable:
    """Map a file into memory. Raises OSError, and InvalidParameter of `table` for another file, or a broken one."""
    with path.open("rb") as file:
        begin = file.read(len(MAGIC) + LENGTH_BYTES)
        length = int.from_bytes(begin[len(MAGIC) :], "little")
        header = file.read(min(length, MOST_HEADER))
        offset = file.tell()
    if not begin.startswith(MAGIC) or len(header) != length:
        raise InvalidParameter("table", f"{path} is no table of n-grams")
    try:
        told = json.loads(header)
        arrays = list(_mapped(path, [(str(kind), int(count)) for kind, count in told["arrays"]], offset))
        if told.get("text"):
            arrays.pop()  # a tokenizer, which earlier checkouts wrote behind
        size = len(LEVEL_KINDS)
        levels = tuple(NgramLevel(*arrays[at : at + size]) for at in range(0, len(arrays), size))
        tokenizer = str(told["tokenizer"])
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise InvalidParameter("table", f"{path} is broken: {error}") from error
    if not LEAST_ORDER <= len(levels) + 1 <= MOST_ORDER or not all(level.sound for level in levels):
        raise InvalidParameter("table", f"{path} is broken: its arrays do not fit each other")
    return NgramTable(levels, tokenizer)


def _mapped(path: Path, arrays: Sequence[tuple[str, int]], offset: int) -> Iterator[NDArray[Any]]:
    """Raises ValueError where the file is too short."""
    size = path.stat().st_size
    for kind, count in arrays:
        offset += -offset % ALIGNMENT
        if kind not in LEVEL_KINDS or count < 0:
            raise ValueError(f"an array of {count} {kind}")
        dtype = np.dtype(kind)
        if count * dtype.itemsize > size - offset:
            raise ValueError(f"an array of {count} {kind} at {offset} of {size} bytes")
        yield np.memmap(path, dtype, "r", offset, (count,)) if count else np.empty(0, dtype)
        offset += count * dtype.itemsize
