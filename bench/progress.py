"""A measurement's progress: a bar in a terminal's last line, and nothing elsewhere (`specwire.progress`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from specwire.progress import LAST_LINE, Bar, LastLine

Turn = TypeVar("Turn")


def tracked(turns: Iterable[Turn], total: int, what: str = "measuring", line: LastLine = LAST_LINE) -> Iterator[Turn]:
    """The same turns. Each is done once the next one is asked for, so nothing is drawn while one is measured."""
    with Bar(what, total, line=line) as bar:
        for turn in turns:
            yield turn
            bar.update()
