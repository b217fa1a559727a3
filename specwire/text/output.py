"""A session's output text: detokenisation, stop strings found in text that comes in pieces, and both together."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from specwire.core.invalid import InvalidParameter
from specwire.text.tokenizer import BYTE_OF, BYTE_TOKEN, decoder_types

# ----------------------------------------------------------------------------------------------------------------------
# Incremental detokenisation: the pieces, joined, are what decoding all tokens at once would give.
#
# There are two ways, chosen by the tokenizer's description, because decoders differ in what a token's text depends on:
#
#     ByteLevel (GPT-2, Llama 3, Qwen)    a token is a run of bytes; the text is their UTF-8 decoding
#     all others                          a token's text depends on its neighbours; a window of recent tokens is decoded
#
# Both cost O(1) per token, amortised.

REPLACEMENT = "\ufffd"

# Tokens after which the window is cut; long enough that a cut's own decode is paid for by the tokens before it.
WINDOW = 8


class Detokenizer:
    """Turns tokens into text as they come; never releases half a character.

    Special tokens and ids without a token give no text, as in `tokenizer.decode(tokens, skip_special_tokens=True)`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        self._special = frozenset(token.content for token in added if token.special)
        self._pieces = _pieces(tokenizer)

    def push(self, token: int) -> str:
        """Text that `token` completes, perhaps none."""
        content = self._tokenizer.id_to_token(token)
        if content is None or content in self._special:
            return ""
        return self._pieces.push(token, content)

    def flush(self) -> str:
        """What remains at the end; incomplete bytes become U+FFFD."""
        return self._pieces.flush()


def _pieces(tokenizer: Tokenizer) -> ByteLevelPieces | WindowPieces:
    """Of tokens but the special ones."""
    if type(tokenizer.decoder).__name__ == "ByteLevel":
        return ByteLevelPieces()
    return WindowPieces(tokenizer, decoder_types(tokenizer))


class ByteLevelPieces:
    """Bytes through an incremental UTF-8 decoder.

    Both it and the `tokenizers` library put one U+FFFD for each maximal invalid part (Unicode standard, section 3.9),
    so malformed sequences, which a model may well emit, come out the same.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, _token: int, content: str) -> str:
        try:
            data = bytes([BYTE_OF[character] for character in content])
        except KeyError:  # an added token with a character outside the alphabet stands for its own text
            data = content.encode()
        return self._decoder.decode(data)

    def flush(self) -> str:
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


class WindowPieces:
    """Decodes a window of the newest tokens; what it adds to the text already known of that window is new.

    Two kinds of text are withheld. Byte tokens (<0x41>): a run of them is UTF-8 as a whole or all U+FFFD, so nothing is
    known before the run ends. A trailing U+FFFD, where a byte-level part may still complete it.

    Invariant: `_known` is the released text of `_window`. A window that does not start with the output starts where no
    character or byte run is open, and its first tokens decode to some text, so that a decoder which treats the start of
    a text in its own way (dropping a space) has done so within the known part.
    """

    def __init__(self, tokenizer: Tokenizer, types: frozenset[str]) -> None:
        self._tokenizer = tokenizer
        self._has_byte_tokens = "ByteFallback" in types
        self._may_end_open = "ByteLevel" in types
        self._window: list[int] = []
        self._known = ""
        self._boundary = 0

    def push(self, token: int, content: str) -> str:
        self._window.append(token)
        if self._has_byte_tokens and BYTE_TOKEN.fullmatch(content):
            return ""
        text = self._decode(self._window)
        complete = not (self._may_end_open and text.endswith(REPLACEMENT))
        new = self._release(text if complete else text[:-1])
        if complete and new:
            self._slide()
        return new

    def flush(self) -> str:
        rest = self._release(self._decode(self._window))
        self._window.clear()
        self._known, self._boundary = "", 0
        return rest

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _release(self, text: str) -> str:
        new = text[len(self._known) :]
        self._known += new
        return new

    def _slide(self) -> None:
        """Cut the window at the last boundary before the text just released, once it is long."""
        if len(self._window) > WINDOW and self._boundary:
            kept = self._window[self._boundary :]
            known = self._decode(kept)
            if known:
                self._window, self._known = kept, known
        self._boundary = len(self._window)


# ----------------------------------------------------------------------------------------------------------------------
# Stop strings, found in text that comes in pieces.

MOST_STOPS = 16
MOST_STOP_CHARACTERS = 1024


def check_stops(stops: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse stop strings that are empty, too long or too many."""
    if len(stops) > MOST_STOPS:
        raise InvalidParameter("stop", f"at most {MOST_STOPS} strings are allowed, not {len(stops)}")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MOST_STOP_CHARACTERS:
            raise InvalidParameter(
                "stop", f"string {index} has {len(stop)} characters, allowed are 1 to {MOST_STOP_CHARACTERS}"
            )
    return stops


class StopScanner:
    """Releases text up to the first stop string and holds back what may begin one.

    The stop that is completed first wins; of two completed by the same character, the one that starts earlier. This
    depends on the text alone, not on how it was cut into pieces. One that is completed too early ends nothing.

    released: code points of the output that have been released by now. stopped_at: where the output ends, once a stop
    was completed.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(check_stops(tuple(stops)))]
        self._held = ""
        self.released = 0
        self.stopped_at: int | None = None

    def push(self, text: str, early: bool = False) -> tuple[str, int | None]:
        """(text to release, offset in code points of the whole output at which it ends, if a stop was completed).

        After a stop nothing more is released. early: what this text completes is no stop.
        """
        if self.stopped_at is not None:
            return "", self.stopped_at
        if not self._matchers:
            self.released += len(text)
            return text, None
        start = len(self._held)
        self._held += text
        for index in range(start, len(self._held)):
            completed = self._completed_by(self._held[index])
            if completed and not early:
                return self._stop(index + 1 - completed)
        return self._release(len(self._held) - max(matcher.matched for matcher in self._matchers)), None

    def flush(self) -> str:
        """The text held back, at the end of the output."""
        return "" if self.stopped_at is not None else self._release(len(self._held))

    def _completed_by(self, character: str) -> int:
        """Length of the longest stop that `character` completes, or 0."""
        return max(matcher.push(character) for matcher in self._matchers)

    def _stop(self, length: int) -> tuple[str, int]:
        text = self._release(length)
        self.stopped_at = self.released
        self._held = ""
        return text, self.stopped_at

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self.released += len(text)
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
        matched = self._next(self.matched, character)
        completed = matched == len(self._stop)
        self.matched = self._fallback[-1] if completed else matched
        return matched if completed else 0

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

    `length` counts the code points of the text so far, with the stop string cut off once it is completed. Before
    `min_tokens` tokens, as of `Stopping`, none ends the text: what a later token completes does.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._scanner = StopScanner(stops)
        self._decoded = 0
        # Tokens to come of which none completes a stop string.
        self._early = min_tokens

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
            pieces.append(self._scan(self._detokenizer.push(token), self._early > 0))
            self._early -= 1
            ends.append(self._decoded)
            released.append(self._scanner.released)
        return Release("".join(pieces), tuple(ends), tuple(released), len(ends), self.stopped_at)

    def finish(self) -> str:
        """The text still held back, at the end; it may itself complete a stop string: see `stopped_at`."""
        if self.stopped_at is not None:
            return ""
        return self._scan(self._detokenizer.flush(), self._early >= 0) + self._scanner.flush()

    def _scan(self, text: str, early: bool) -> str:
        self._decoded += len(text)
        return self._scanner.push(text, early)[0]
