"""Where a run's figures go. What is recorded in bench/results/ is a whole run, as long as the pages say."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

WHOLE_MINUTES = 10.0


class SoakFigures(Protocol):
    """What came of a run. whole: it is what the record is of, whether its bars hold or not."""

    @property
    def whole(self) -> bool: ...

    def write(self, path: Path) -> None: ...


def add_argument(line: argparse.ArgumentParser, *records: Path) -> None:
    names = " or ".join(path.name for path in records)
    line.add_argument("--out", type=Path, metavar="FILE", help=f"JSON (default: a whole run goes into {names})")


def check(out: Path | None) -> None:
    """Before a run. OSError where its folder cannot be made."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)


def keep(figures: SoakFigures, out: Path | None, record: Path, say: Callable[[str], None]) -> None:
    """Write it where it was asked for; else over the record, if it may stand there."""
    if out is not None:
        figures.write(out)
    elif figures.whole:
        figures.write(record)
    else:
        say(f"not a whole run: {record.name} is left as it is (--out FILE keeps these figures)")
