"""A session's output text: detokenisation and stop strings together."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from specwire.text.detokenizer import Detokenizer
from specwire.text.stops import StopScanner


@dataclass(frozen=True, slots=True)
class Release:
    """What some tokens release.

    text: may be empty.
    text_ends: one per kept token, where its text ends in the whole output, in code points, counting what is held back.
    released: one per kept token, how much of the whole output is released once it is there, whatever comes with it.
    kept: how many of the tokens belong to the output; less than all only when a stop string was completed.
    stopped_at: the output's length in code points, once a stop string was completed.
    """

    text: str
    text_ends: tuple[int, ...]
    released: tuple[int, ...]
    kept: int
    stopped_at: int | None


class OutputText:
    """The text of one output, token by token. It holds no truth: pushing the log's tokens again rebuilds it.

    `length` counts the code points of the text so far, with the stop string cut off once it is completed.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._scanner = StopScanner(stops)
        self._decoded = 0

    @property
    def stopped_at(self) -> int | None:
        return self._scanner.stopped_at

    @property
    def length(self) -> int:
        return self._decoded if self.stopped_at is None else self.stopped_at

    def push(self, tokens: Sequence[int]) -> Release:
        """Add tokens up to the one that completes a stop string; after that none is kept."""
        pieces: list[str] = []
        ends: list[int] = []
        released: list[int] = []
        for token in tokens:
            if self.stopped_at is not None:
                break
            pieces.append(self._scan(self._detokenizer.push(token)))
            ends.append(self._decoded)
            released.append(self._scanner.released)
        return Release("".join(pieces), tuple(ends), tuple(released), len(ends), self.stopped_at)

    def peek(self, tokens: Sequence[int]) -> Release:
        """What `push` would release if nothing had to be withheld as a stop string's possible beginning.

        Nothing changes. A complete stop string ends the text here too; half a character is not shown.
        """
        trial = copy(self)
        trial._detokenizer = self._detokenizer.copy()
        trial._scanner = self._scanner.copy()
        release = trial.push(tokens)
        return replace(release, text=release.text + trial._scanner.flush())

    def finish(self) -> str:
        """The text still held back, at the end; it may itself complete a stop string: see `stopped_at`."""
        if self.stopped_at is not None:
            return ""
        return self._scan(self._detokenizer.flush()) + self._scanner.flush()

    def _scan(self, text: str) -> str:
        self._decoded += len(text)
        return self._scanner.push(text)[0]
