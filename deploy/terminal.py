"""Provisional text on a terminal: it stands behind the decided text and is replaced in place.

A saved cursor position is lost when the screen scrolls, so the way back is counted: rows up, column, erase to the end.
What is counted are cells, so a terminal that gives a character another width than Unicode does, or that is resized
while something provisional stands there, may show a remnant; decided text is always written once and whole.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from unicodedata import category, combining, east_asian_width

from specwire.rpc.process import visible

MARKED = "\x1b[2;4m"  # dim and underlined
RESET = "\x1b[0m"
ERASE = "\x1b[J"
TAB = 8
FALLBACK = os.terminal_size((80, 24))


def is_terminal() -> bool:
    """Whether stdout can take text back."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def size() -> os.terminal_size:
    """Columns and rows of stdout, or a guess where it does not say."""
    try:
        told = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return FALLBACK
    return told if told.columns > 1 and told.lines > 1 else FALLBACK


@dataclass(frozen=True, slots=True)
class Spot:
    """Rows below some row, and the column. column == width: behind a full row; the next character begins a new one."""

    row: int
    column: int

    def after(self, character: str, width: int) -> Spot:
        """Where the cursor is once a character has been written here."""
        match character:
            case "\n":
                return Spot(self.row + 1, 0)
            case "\t":
                return Spot(self.row, max(self.column, min(width - 1, (self.column // TAB + 1) * TAB)))
        cells = cells_of(character)
        if cells and self.column + cells > width:
            return Spot(self.row + 1, cells)
        return Spot(self.row, self.column + cells)


def cells_of(character: str) -> int:
    """Columns that a character takes: 0 for those that combine with the one before and for controls."""
    if combining(character) or category(character) in ("Cc", "Cf", "Me", "Mn"):
        return 0
    return 2 if east_asian_width(character) in "WF" else 1


class ProvisionalTail:
    """What to write so that the newest provisional text stands behind the decided text. Begins at column 0.

    Invariant: the cursor is where `_shown`, written from column `_column` on, ends; `_rows` rows below that start.
    """

    def __init__(self, size: Callable[[], os.terminal_size] = size) -> None:
        self._size = size
        self._column = 0
        self._provisional = ""
        self._shown = ""
        self._rows = 0

    def decided(self, text: str, painted: str) -> str:
        """`text` has been decided; `painted` is what to write for it. What it confirms is not taken back meanwhile."""
        text = visible(text)
        rest = self._provisional[len(text) :] if self._provisional.startswith(text) else ""
        taken_back = self.show("")
        width, spot = self._size().columns, Spot(0, self._column)
        for character in text:
            spot = spot.after(character, width)
        self._column = spot.column
        return taken_back + painted + self.show(rest)

    def show(self, text: str) -> str:
        """Have `text` stand there instead of what was provisional; "" takes all of it back."""
        self._provisional = visible(text)
        shown, rows = self._fitting(self._provisional)
        if shown == self._shown:
            return ""
        written = self._back() + (f"{MARKED}{shown}{RESET}" if shown else "")
        self._shown, self._rows = shown, rows
        return written

    def _back(self) -> str:
        if not self._shown:
            return ""
        up = f"\x1b[{self._rows}A" if self._rows else ""
        return f"{up}\x1b[{self._column + 1}G{ERASE}"

    def _fitting(self, text: str) -> tuple[str, int]:
        """As much of `text` as fits half of the screen, and how many rows below its start it ends.

        Behind a full row nothing fits: terminals differ in where the cursor is then, so there is no way back.
        """
        columns, lines = self._size()
        spot, pieces = Spot(0, self._column), list[str]()
        if spot.column >= columns:
            return "", 0
        for character in text:
            following = spot.after(character, columns)
            if following.row > lines // 2:
                break
            spot = following
            pieces.append(character)
        return "".join(pieces), spot.row
