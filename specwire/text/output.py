"""A session's output text: stop strings, found in text that comes in pieces, and detokenisation."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from specwire.core.invalid import InvalidParameter
from specwire.text.detokenizer import Detokenizer

# ----------------------------------------------------------------------------------------------------------------------
# Stop strings, found in text that comes in pieces.

MOST_STOPS = 16
MOST_STOP_CHARACTERS = 1024


def check_stops(stops: Sequence[str]) -> None:
    """Refuse stop strings that are empty, too long or too many."""
    if len(stops) > MOST_STOPS:
        raise InvalidParameter("stop", f"at most {MOST_STOPS} strings are allowed, not {len(stops)}")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MOST_STOP_CHARACTERS:
            raise InvalidParameter(
                "stop", f"string {index} has {len(stop)} characters, allowed are 1 to {MOST_STOP_CHARACTERS}"
            )


class StopScanner:
    """Releases text up to the first stop string and holds back what may begin one.

    The stop that is completed first wins; of two completed by the same character, the one that starts earlier. This
    depends on the text alone, not on how it was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        check_stops(stops)
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self._released = 0
        self.stopped_at: int | None = None

    def push(self, text: str) -> tuple[str, int | None]:
        """(text to release, offset in code points of the whole output at which it ends, if a stop was completed).

        After a stop nothing more is released.
        """
        if self.stopped_at is not None:
            return "", self.stopped_at
        if not self._matchers:
            self._released += len(text)
            return text, None
        start = len(self._held)
        self._held += text
        for index in range(start, len(self._held)):
            completed = self._completed_by(self._held[index])
            if completed:
                return self._stop(index + 1 - completed)
        return self._release(len(self._held) - max(matcher.matched for matcher in self._matchers)), None

    @property
    def released(self) -> int:
        """Code points of the output that have been released by now."""
        return self._released

    def flush(self) -> str:
        """The text held back, at the end of the output."""
        return "" if self.stopped_at is not None else self._release(len(self._held))

    def copy(self) -> StopScanner:
        """A copy that goes on from here by itself."""
        other = copy(self)
        other._matchers = [copy(matcher) for matcher in self._matchers]
        return other

    def _completed_by(self, character: str) -> int:
        """Length of the longest stop that `character` completes, or 0."""
        return max(matcher.push(character) for matcher in self._matchers)

    def _stop(self, length: int) -> tuple[str, int]:
        text = self._release(length)
        self.stopped_at = self._released
        self._held = ""
        return text, self.stopped_at

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._released += len(text)
        return text


class _Matcher:
    """One stop string, matched a character at a time (Knuth, Morris, Pratt 1977).

    Invariant: `matched` is the length of the longest proper prefix of the stop that ends the text so far.
    """

    __slots__ = ("_fallback", "_stop", "matched")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._fallback = [0]
        self.matched = 0
        for character in stop[1:]:
            self._fallback.append(self._next(self._fallback[-1], character))

    def push(self, character: str) -> int:
        """The stop's length if `character` completes it, else 0."""
        self.matched = self._next(self.matched, character)
        return self.matched if self.matched == len(self._stop) else 0

    def _next(self, matched: int, character: str) -> int:
        while matched and self._stop[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + (self._stop[matched] == character)


# ----------------------------------------------------------------------------------------------------------------------
# A session's output text: detokenisation and stop strings together.


@dataclass(frozen=True, slots=True)
class Release:
    """The text that some tokens release.

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
        """What `push` would release if nothing were withheld as a stop string's possible beginning.

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
