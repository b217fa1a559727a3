"""A constraint that another process holds (`specwire.text.nursery`), as a session sees it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

import numpy as np

from specwire.core.law.constraint import Mask
from specwire.text.frames import Lost, readable, receive, send

# Seconds. The other process has a limit of its own, for processor time, which it reaches first unless it gets none.
PATIENCE_S = 10.0
# Tokens that are asked about at once.
MOST_AHEAD = 32


class RemoteMatching:
    """Implements `specwire.core.law.constraint.Matcher`. One that is lost allows nothing any more, and says so.

    What is taken or gone back on is told with the next question. What was answered last says which of the tokens that
    are decided next may stand, so a step costs one question, which may be asked before its forward and heard behind it.

    Invariant: rows[i] is what may stand behind tokens[:at] and window[:i]; the other process has tokens[:told].

    Args:
        fd: of the connection, owned from now on; closing it ends the process.
        tokens: of the output, that the other process has taken.
    """

    def __init__(self, fd: int, tokens: Sequence[int], vocabulary: int, eos_ids: Sequence[int]) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        self._tokens = list(tokens)
        self._told = len(self._tokens)
        self._vocabulary = vocabulary
        self._eos_ids = frozenset(eos_ids)
        self._at = 0
        self._window: tuple[int, ...] = ()
        self._rows: list[Mask | None] = []
        self._asked: tuple[int, tuple[int, ...]] | None = None
        self._trouble = ""

    @property
    def length(self) -> int:
        return len(self._tokens)

    @property
    def trouble(self) -> str:
        return self._trouble

    @property
    def _ended(self) -> bool:
        return bool(self._tokens) and self._tokens[-1] in self._eos_ids

    def take(self, tokens: Sequence[int]) -> int:
        for taken, token in enumerate(tokens):
            mask = self._next(tokens[taken : taken + MOST_AHEAD])
            if mask is None or not mask[token]:
                return taken
            self._tokens.append(token)
        return len(tokens)

    def rollback(self, length: int) -> None:
        if length < self.length:
            del self._tokens[length:]
            self._told = min(self._told, length)
            if length < self._at:
                self._rows = []
            self._asked = self._asked and (-1, ())  # its answer is of another text

    def ask(self, window: Sequence[int]) -> None:
        if self._asked is None and not self._ended and not self._trouble and not self._knows(tuple(window)):
            said = {"back": self._told, "take": self._tokens[self._told :], "window": list(window)}
            self._told, self._asked = self.length, (self.length, tuple(window))
            try:
                send(self._fd, said)
            except Lost as lost:
                self._lose(lost)

    def heard(self, limit_s: float) -> bool:
        if self._asked is None or self._trouble:
            return True
        if readable(self._fd, limit_s):
            self._hear()
        return self._asked is None

    @property
    def known(self) -> tuple[int, ...] | None:
        there = bool(self._rows) and self._at == self.length and self._asked is None
        return self._window if there and not self._ended else None

    def masks(self, window: Sequence[int]) -> list[Mask | None]:
        nothing: list[Mask | None] = [None] * (len(window) + 1)
        if self._ended:
            return nothing
        window = tuple(window)
        self._hear()
        if not self._knows(window):
            self.ask(window)
            self._hear()
        if self._trouble:
            return [np.zeros(self._vocabulary, dtype=np.bool_), *nothing[1:]]
        return [*self._rows, *nothing][: len(window) + 1]

    def _knows(self, window: tuple[int, ...]) -> bool:
        return bool(self._rows) and self._at == self.length and self._window[: len(window)] == window

    def _next(self, tokens: Sequence[int]) -> Mask | None:
        """What may stand behind what is taken. Where that must be asked for, so is what may stand behind `tokens`."""
        known = self.length - self._at
        if 0 <= known < len(self._rows) and tuple(self._tokens[self._at :]) == self._window[:known] and not self._ended:
            return self._rows[known]
        return self.masks(tokens)[0]

    def _hear(self) -> None:
        """The answer that is due, if one is."""
        if self._asked is None or self._trouble:
            return
        (self._at, self._window), self._asked = self._asked, None
        try:
            said, data = receive(self._fd, PATIENCE_S)
        except Lost as lost:
            self._lose(lost)
            return
        bits = np.frombuffer(data, dtype=np.uint8).reshape(said["rows"], -1)
        rows = np.unpackbits(bits, axis=1, count=self._vocabulary).view(np.bool_)
        known = [*rows, *[None] * (len(self._window) + 1 - len(rows))]
        self._rows = known if self._at >= 0 else []
        self._trouble = said["trouble"]

    def _lose(self, lost: Lost) -> None:
        self._trouble, self._rows, self._asked = str(lost), [], None
