"""Texts to learn, to propose or to answer from: files, and the files in folders."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from specwire.core.invalid import InvalidParameter
from specwire.core.model import ModelError

SUFFIXES = (".txt", ".md", ".py", ".jsonl")


def named_texts(paths: Iterable[Path], field: str) -> Iterator[tuple[str, str]]:
    """Name and text of each file, those in folders in order of their names; of a .jsonl file, of each line's "text".

    Raises:
        InvalidParameter: of `field`, names the file that cannot be read.
    """
    for path in paths:
        for file in sorted(each for each in path.rglob("*") if each.suffix in SUFFIXES) if path.is_dir() else [path]:
            try:
                whole = file.read_text(encoding="utf-8")
                yield from _lines(file, whole) if file.suffix == ".jsonl" else [(str(file), whole)]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise InvalidParameter(field, f"{file}: cannot be read: {type(error).__name__}: {error}") from error


def texts_of(paths: Sequence[Path]) -> Iterator[str]:
    """The texts of files, and of the files in folders, in order of their names.

    Raises:
        ModelError: names the file that cannot be read.
    """
    try:
        for _, text in named_texts(paths, "data"):
            yield text
    except InvalidParameter as error:
        raise ModelError(str(error)) from error


def _lines(file: Path, whole: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(whole.splitlines(), 1):
        if line.strip():
            yield f"{file}:{number}", str(json.loads(line)["text"])
