"""Files that others may hold open, or map into memory, while new ones take their place.

A file that is written in place changes under whoever reads it, and one that is cut ends a process that has it mapped
(SIGBUS). So what services read is written beside, taken by the disk, and renamed over the old one, whose readers keep
it. Whoever writes a table, a model, a head or a record writes it with this module.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Behind the name of what is being written.
UNFINISHED = ".unfinished"


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Where to write a file's new content. It takes the file's place when the block ends without an error.

    A symbolic link stays one: what it leads to is replaced. What is there and no file, as /dev/stdout, is written to.
    Raises OSError.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    whole = path.resolve()
    beside = _beside(whole)
    try:
        yield beside
        _take_place(beside, whole)
    finally:
        beside.unlink(missing_ok=True)
    to_disk(whole.parent)


@contextmanager
def replaced_in(folder: Path) -> Iterator[Path]:
    """A folder to write files into. They take their places in `folder`, which is made if need be, when the block ends
    without an error; what else is there stays. Raises OSError.
    """
    whole = folder.resolve()
    whole.mkdir(parents=True, exist_ok=True)
    beside = _beside(whole / "files")
    beside.mkdir(mode=0o700)
    try:
        yield beside
        for file in sorted(beside.iterdir()):
            _take_place(file, (whole / file.name).resolve())
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    to_disk(whole)


def write_text(path: Path, text: str) -> None:
    """Replace a file's content. Raises OSError."""
    with replaced(path) as beside:
        beside.write_text(text, encoding="utf-8")


def to_disk(path: Path) -> None:
    """Have the disk take a file, or what a folder names. Raises OSError."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def leads_out(path: Path, folder: Path) -> bool:
    """Whether symbolic links have what is in a folder lie elsewhere."""
    return not path.resolve().is_relative_to(folder.resolve())


def _beside(whole: Path) -> Path:
    """A hidden name that nothing has."""
    return whole.with_name(f".{whole.name}.{secrets.token_hex(8)}{UNFINISHED}")


def _take_place(beside: Path, whole: Path) -> None:
    """Who may read the old file may read the new one."""
    to_disk(beside)
    if whole.exists():
        beside.chmod(whole.stat().st_mode & 0o7777)
    beside.replace(whole)
