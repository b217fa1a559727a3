"""How far something is, on a terminal's last line; nothing at all where stderr is none (a pipe, a file, a log).

A bar stands in the last line and is replaced in place, at most every REDRAW_S. Whoever writes whole lines meanwhile
writes them with `LAST_LINE.say`, which puts them above it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

REDRAW_S = 0.1
CELLS = 24
FEWEST_CELLS = 6
FALLBACK = 80
ERASED = "\r\x1b[J"


class LastLine:
    """The last line of the terminal that stderr is. Usable from several threads.

    quiet: show nothing there, because a program reads this process (--json).
    """

    def __init__(self, stream: Callable[[], TextIO] = lambda: sys.stderr) -> None:
        self.quiet = False
        self._stream = stream
        self._shown = ""
        self._lock = threading.Lock()

    @property
    def is_terminal(self) -> bool:
        """Whether bars are wanted, and a line can be taken back."""
        return not self.quiet and self._stream().isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def say(self, line: str, to: TextIO | None = None) -> None:
        """Write a whole line, to stderr or to another stream of the same terminal, above what is shown."""
        with self._lock:
            stream, shown = self._stream(), self._shown
            if shown:
                stream.write(ERASED)
                stream.flush()
            (to or stream).write(line + "\n")
            (to or stream).flush()
            if shown:
                stream.write(shown)
                stream.flush()

    def show(self, text: str) -> None:
        """Have `text`, cut to the terminal's width, be the last line; "" takes it away."""
        with self._lock:
            text = text[: self.width]
            if text == self._shown or (not text and not self._shown):
                return
            self._shown = text
            self._stream().write(ERASED + text)
            self._stream().flush()

    @property
    def width(self) -> int:
        """Characters that a text may have; the last column stays free, for a full one may begin another line."""
        return max(1, self._columns() - 1)

    def _columns(self) -> int:
        """Width of the terminal that is drawn on; stdout may be a pipe."""
        try:
            return int(os.environ.get("COLUMNS", "")) or FALLBACK
        except ValueError:
            pass
        try:
            return os.get_terminal_size(self._stream().fileno()).columns or FALLBACK
        except (OSError, ValueError):
            return FALLBACK


LAST_LINE = LastLine()


class ProgressBar:
    """How much of a total is done. Draws nothing where the line is no terminal's.

    Args:
        what: is done, in a word or two.
        total: 0 where nobody knows, which shows the time alone.
        done: so much was done before, at no cost of time now.
    """

    def __init__(
        self,
        what: str,
        total: int = 0,
        *,
        done: int = 0,
        line: LastLine = LAST_LINE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what = what
        self.total = total
        self._line = line
        self._clock = clock
        self._began = clock()
        self._drawn: float | None = None
        self._done = self._first = done
        self._note = ""
        self._on = line.is_terminal

    def __enter__(self) -> Self:
        self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave nothing behind."""
        if self._on:
            self._line.show("")

    def update(self, count: int = 1, note: str | None = None) -> None:
        """Add `count` to what is done; `note` is what is being done now."""
        self.at(self._done + count, note)

    def at(self, done: int, note: str | None = None) -> None:
        """Set how much is done in all."""
        self._done = done
        self._note = self._note if note is None else note
        self._draw()

    def _draw(self) -> None:
        now = self._clock()
        if self._on and (self._drawn is None or now - self._drawn >= REDRAW_S):
            self._drawn = now
            self._line.show(self.text(now - self._began, self._line.width))

    def text(self, elapsed: float, width: int = 0) -> str:
        """The line. elapsed: seconds. width: characters there are, for which the bar, not its note, gives way."""
        note = f"  {self._note}" if self._note else ""
        if not self.total:
            return f"{self.what}  {_clocked(elapsed)}{note}"
        share = min(1.0, self._done / self.total)
        made, missing = self._done - self._first, self.total - self._done
        left = f", {_clocked(elapsed * missing / made)} left" if made > 0 and missing > 0 else ""
        counts = f"{self._done}/{self.total}"
        said = f"] {counts}  {_clocked(elapsed)}{left}{note}"
        room = width - len(f"{self.what} [{said}") if width else CELLS
        cells = min(CELLS, max(FEWEST_CELLS, room))
        full = round(share * cells)
        return f"{self.what} [{'=' * full}{' ' * (cells - full)}{said}"


def _clocked(seconds: float) -> str:
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
