"""A terminal: enough of one to see what a user sees."""

from __future__ import annotations

import re

PART = re.compile(r"\x1b\[(\d*)([AGJm])|\x1b\[([\d;]*)m|.", re.DOTALL)
WIDE = "漢字"
COMBINING = "\u0301"


class Screen:
    """Cells of `columns` x `lines` and all rows that have scrolled off; the cursor begins in the top left corner.

    A full row keeps the cursor in its last column until the next character comes.
    """

    def __init__(self, columns: int, lines: int) -> None:
        self.columns = columns
        self.lines = lines
        self._rows: list[list[str]] = [[]]
        self._top = 0
        self._row = self._column = 0

    @property
    def text(self) -> str:
        """Everything written, those rows too that have scrolled off; a row a line, without blanks at its end."""
        return "\n".join("".join(row).rstrip() for row in self._rows).rstrip()

    def write(self, written: str) -> None:
        for part in PART.finditer(written):
            count, kind, _ = part.groups()
            if kind == "A":
                self._row = max(self._top, self._row - int(count or 1))
                self._column = min(self._column, self.columns - 1)
            elif kind == "G":
                self._column = int(count or 1) - 1
                assert self._column < self.columns
            elif kind == "J":
                del self._rows[self._row + 1 :]
                del self._rows[self._row][self._column :]
            elif part.group().startswith("\x1b"):
                assert part.group().endswith("m"), part.group()
            else:
                self._put(part.group())

    def _put(self, character: str) -> None:
        match character:
            case "\n":
                self._down()
            case "\r":
                self._column = 0
            case "\t":
                if self._column < self.columns:
                    self._column = min(self.columns - 1, (self._column // 8 + 1) * 8)
            case _ if character == COMBINING:
                pass
            case _:
                cells = 2 if character in WIDE else 1
                if self._column + cells > self.columns:
                    self._down()
                row = self._rows[self._row]
                row += [" "] * (self._column + cells - len(row))
                row[self._column : self._column + cells] = [character] + [""] * (cells - 1)
                self._column += cells

    def _down(self) -> None:
        self._row, self._column = self._row + 1, 0
        if self._row == len(self._rows):
            self._rows.append([])
        self._top = max(self._top, self._row - self.lines + 1)
