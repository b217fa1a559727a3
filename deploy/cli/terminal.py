"""Output on a terminal: generated text in colours, and provisional text that is replaced in place."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unicodedata import category, combining, east_asian_width

from specwire.client import Chunk
from specwire.core.messages import Outcome
from specwire.rpc.process import visible

# ----------------------------------------------------------------------------------------------------------------------
# Generated text for a terminal: each piece in the colour of its token's outcome.

RESET = "\x1b[0m"
DIM = "\x1b[2m"
GREEN = "\x1b[32m"
YELLOW = "\x1b[33m"
BLUE = "\x1b[36m"
COLOURS = {Outcome.ACCEPTED: GREEN, Outcome.RECOVERED: YELLOW, Outcome.BONUS: BLUE, Outcome.DIRECT: BLUE}
NAMES = {GREEN: "accepted", YELLOW: "recovered", BLUE: "bonus or direct"}


def wants_colour() -> bool:
    """Whether stdout is a terminal whose user has not asked for plain text (the NO_COLOR convention)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def legend() -> str:
    """Return what the colours mean."""
    return "  ".join(f"{colour}{name}{RESET}" for colour, name in NAMES.items())


class Painter:
    """Turns released text into coloured text.

    Text is released later than its tokens are told (it may begin a stop string), so the tokens wait here.

    Args:
        colour: whether to colour it.
        raw: leave its control characters as they are, for what is no terminal; else they are made visible.
    """

    def __init__(self, colour: bool, raw: bool = False) -> None:
        self._colour = colour
        self._raw = raw
        self._at = 0  # code points returned so far
        self._tokens: deque[tuple[int, str]] = deque()  # (where the token's text ends, its colour)

    def chunk(self, chunk: Chunk) -> str:
        """Take in a chunk's tokens; return the text that it releases, painted."""
        self._tokens.extend(zip(chunk.text_ends, (COLOURS[outcome] for outcome in chunk.outcomes), strict=True))
        return self.text(chunk.text)

    def text(self, text: str) -> str:
        """Return released text, painted."""
        return self._paint(text) if self._colour else self.plain(text)

    def plain(self, text: str) -> str:
        """Return text of no token, or text that is not painted."""
        return text if self._raw else visible(text)

    def _paint(self, text: str) -> str:
        pieces = []
        while text:
            while len(self._tokens) > 1 and self._tokens[0][0] <= self._at:
                self._tokens.popleft()
            end, colour = self._tokens[0] if self._tokens else (0, "")
            length = end - self._at if end > self._at else len(text)  # behind the last token: what was incomplete
            piece, text = text[:length], text[length:]
            shown = self.plain(piece)
            pieces.append(f"{colour}{shown}{RESET}" if colour else shown)
            self._at += len(piece)
        return "".join(pieces)


def painter() -> Painter:
    """Return one for stdout."""
    return Painter(wants_colour(), raw=not sys.stdout.isatty())


def dim(text: str, colour: bool) -> str:
    """Return dimmed text."""
    return f"{DIM}{text}{RESET}" if colour else text


def number(count: int, noun: str) -> str:
    """Return "1 token", "2 tokens"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def shortened(text: str, width: int) -> str:
    """Return its first words, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 3]}..."


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned columns: the first to the left, the others to the right; the first row is the head."""
    rows = [[visible(cell, lines=False) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [_line(row, widths) for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
    return "  ".join(cells).rstrip()


# ----------------------------------------------------------------------------------------------------------------------
# Provisional text on a terminal: it stands behind the decided text and is replaced in place.
#
# A saved cursor position is lost when the screen scrolls, so the way back is counted: rows up, column, erase to the
# end. What is counted are cells, so a terminal that gives a character another width than Unicode does, or that is
# resized while something provisional stands there, may show a remnant; decided text is always written once and in full.

MARKED = "\x1b[2;4m"  # dim and underlined
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
class CursorPosition:
    """Rows below some row, and the column. column == width: behind a full row; the next character begins a new one."""

    row: int
    column: int

    def after(self, character: str, width: int) -> CursorPosition:
        """Where the cursor is once a character has been written here."""
        match character:
            case "\n":
                return CursorPosition(self.row + 1, 0)
            case "\t":
                return CursorPosition(self.row, max(self.column, min(width - 1, (self.column // TAB + 1) * TAB)))
        cells = cells_of(character)
        if cells and self.column + cells > width:
            return CursorPosition(self.row + 1, cells)
        return CursorPosition(self.row, self.column + cells)


def cells_of(character: str) -> int:
    """Columns that a character takes: 0 for those that combine with the one before and for controls."""
    if combining(character) or category(character) in ("Cc", "Cf", "Me", "Mn"):
        return 0
    return 2 if east_asian_width(character) in "WF" else 1


class ProvisionalTail:
    """Gives what to write so that the newest provisional text stands behind the decided text. Begins at column 0.

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
        width, spot = self._size().columns, CursorPosition(0, self._column)
        for character in text:
            spot = spot.after(character, width)
        self._column = spot.column
        return taken_back + painted + self.show(rest)

    def show(self, text: str) -> str:
        """Replace the provisional text by `text`; "" removes it."""
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
        spot, pieces = CursorPosition(0, self._column), list[str]()
        if spot.column >= columns:
            return "", 0
        for character in text:
            following = spot.after(character, columns)
            if following.row > lines // 2:
                break
            spot = following
            pieces.append(character)
        return "".join(pieces), spot.row
