"""Output on a terminal: generated text in colours, and tables."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Sequence

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
