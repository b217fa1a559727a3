"""What a session needs to know of its text; `specwire.text` implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class ScannedText(Protocol):
    """Text released by some tokens; of them the first `kept` belong to the output."""

    @property
    def text(self) -> str: ...
    @property
    def text_ends(self) -> tuple[int, ...]: ...
    @property
    def released(self) -> tuple[int, ...]: ...
    @property
    def kept(self) -> int: ...
    @property
    def stopped_at(self) -> int | None: ...


class OutputScanner(Protocol):
    """Detokenises and looks for stop strings; sees every token of the output once, in order.

    `specwire.text.OutputText` is the real one. stopped_at is the output's length in code points where a stop string
    cuts it; `finish` returns what was withheld and ends the output.
    """

    def push(self, tokens: Sequence[int]) -> ScannedText: ...
    def finish(self) -> str: ...
    @property
    def length(self) -> int: ...


class PeekingScanner(OutputScanner, Protocol):
    """Says, besides, what tokens would show that it has not seen yet.

    `peek` changes nothing. Its text goes on where the released text ends; what only may begin a stop string is not
    withheld from it.
    """

    def peek(self, tokens: Sequence[int]) -> ScannedText: ...
