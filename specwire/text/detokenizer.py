"""Incremental detokenisation: the pieces, joined, are what decoding all tokens at once would give.

There are two ways, chosen by the tokenizer's description, because decoders differ in what a token's text depends on:

    ByteLevel (GPT-2, Llama 3, Qwen)    a token is a run of bytes; the text is their UTF-8 decoding
    all others                          a token's text depends on its neighbours; a window of recent tokens is decoded

Both cost O(1) per token, amortised.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Mapping
from copy import copy
from typing import Protocol, Self

from tokenizers import Tokenizer

# ----------------------------------------------------------------------------------------------------------------------
# A model's tokenizer from its JSON form, text to token ids, and what makes two vocabularies the same.


class TokenizerError(ValueError):
    """The bytes are not a tokenizer in the `tokenizers` library's JSON form."""


def load_tokenizer(text: bytes) -> Tokenizer:
    """The tokenizer, with padding and truncation off: a prompt is encoded whole or refused, never cut."""
    if not text:
        raise TokenizerError("tokenizer_json: is empty")
    try:
        tokenizer = Tokenizer.from_str(text.decode())
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"tokenizer_json: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of `text`; nothing is added (no beginning-of-sequence token, no template)."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def vocabulary_map(tokenizer_json: bytes, width: int) -> dict[int, str]:
    """Token of each id. A model without a tokenizer calls its `width` ids by their numbers. Raises TokenizerError."""
    if not tokenizer_json:
        return {index: str(index) for index in range(width)}
    vocabulary: dict[str, int] = load_tokenizer(tokenizer_json).get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise TokenizerError("tokenizer_json: has no tokens")
    return {index: token for token, index in vocabulary.items()}


def vocabulary_fingerprint(vocabulary: Mapping[int, str]) -> str:
    """sha256 (hex) of the sorted (id, token) pairs."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# The bytes of one token.

# A word's beginning in tokenizers that spell spaces so (SentencePiece).
SPACE = "\u2581"


class TokenBytes:
    """What each token stands for by itself: part of a character perhaps, or a special token's own name."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        self._byte_level = "ByteLevel" in decoder_types(tokenizer)

    def of(self, token: int) -> bytes:
        """Empty for an id that has no token."""
        content = self._tokenizer.id_to_token(token)
        return b"" if content is None else self.spelt(token, content)

    def spelt(self, token: int, content: str) -> bytes:
        """Of an id whose token is `content`."""
        if token in self._added:
            return content.encode()
        if content.startswith("<0x") and BYTE_TOKEN.fullmatch(content):
            return bytes([int(content[3:5], 16)])
        if self._byte_level:
            try:
                return bytes(map(BYTE_OF.__getitem__, content))
            except KeyError:
                pass  # a character outside the alphabet: the token stands for its own text
        return content.replace(SPACE, " ").encode()

    def text(self, token: int) -> str:
        return self.of(token).decode(errors="replace")


REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")

# Tokens after which the window is cut; long enough that a cut's own decode is paid for by the tokens before it.
WINDOW = 8


class Pieces(Protocol):
    """Tokens in, text out; special tokens never get here."""

    def push(self, token: int, content: str) -> str: ...

    def flush(self) -> str: ...

    def copy(self) -> Self: ...


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

    def copy(self) -> Detokenizer:
        """A copy that goes on from here by itself. It is cheap, because the tokenizer is shared."""
        other = copy(self)
        other._pieces = self._pieces.copy()
        return other


def _pieces(tokenizer: Tokenizer) -> Pieces:
    if type(tokenizer.decoder).__name__ == "ByteLevel":
        return ByteLevelPieces()
    return WindowPieces(tokenizer, decoder_types(tokenizer))


def decoder_types(tokenizer: Tokenizer) -> frozenset[str]:
    """Names of the decoder and of its parts, such as ByteLevel; empty where tokens are whole words."""
    return types_in(json.loads(tokenizer.decoder.__getstate__())) if tokenizer.decoder is not None else frozenset()


def types_in(description: dict[str, object]) -> frozenset[str]:
    """As `decoder_types`, from a decoder's description in JSON."""
    parts = description.get("decoders", ())
    types = {str(description.get("type"))}
    if isinstance(parts, list):
        types.update(*(types_in(part) for part in parts))
    return frozenset(types)


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's byte-level alphabet: printable Latin-1 as is, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


BYTE_OF = _byte_alphabet()


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

    def copy(self) -> ByteLevelPieces:
        other = ByteLevelPieces()
        other._decoder.setstate(self._decoder.getstate())
        return other


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

    def copy(self) -> WindowPieces:
        other = copy(self)
        other._window = list(self._window)
        return other

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
