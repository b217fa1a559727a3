"""The tokenizers of the models that are served, each read once, however many verifiers have it."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass

from tokenizers import Tokenizer

from specwire.text import TokenizerError, load_tokenizer
from specwire.v1 import common_pb2

# Bytes from which reading one takes long enough for sessions to feel it.
LONG_TEXT = 1 << 16


@dataclass(frozen=True, slots=True)
class ReadTokenizer:
    """longest: the most bytes of text that one token may stand for."""

    tokenizer: Tokenizer
    longest: int

    @classmethod
    def of(cls, text: bytes) -> ReadTokenizer:
        """Raises TokenizerError."""
        tokenizer = load_tokenizer(text)
        # One byte more a token: for the separator that tokenizers of words drop.
        longest = 1 + max((len(token.encode()) for token in tokenizer.get_vocab()), default=0)
        return cls(tokenizer, longest)


class Tokenizers:
    """By the hash of their text. `latest`: of the one that was read last; "" before any was."""

    def __init__(self) -> None:
        self.latest = ""
        self._read: dict[str, ReadTokenizer | TokenizerError] = {}

    async def take(self, info: common_pb2.GetModelInfoResponse) -> None:
        """Take the tokenizer out of a description; read it, if it is new, without holding up the event loop."""
        text, told = info.tokenizer_json, info.tokenizer_hash
        info.ClearField("tokenizer_json")
        if not text or told in self._read:
            return
        reading = asyncio.to_thread(_read, text, told) if len(text) > LONG_TEXT else None
        read = _read(text, told) if reading is None else await reading
        if read is not None:
            self._read[told] = read
            self.latest = told

    def of(self, info: common_pb2.GetModelInfoResponse) -> ReadTokenizer:
        """Raises TokenizerError."""
        read = self._read.get(info.tokenizer_hash)
        if read is None:
            raise TokenizerError("tokenizer_json: did not come, or is another one than its hash says")
        if isinstance(read, TokenizerError):
            raise read
        return read

    def known(self, told: str) -> ReadTokenizer | None:
        """The tokenizer with this hash, if it was ever here."""
        read = self._read.get(told)
        return read if isinstance(read, ReadTokenizer) else None


def _read(text: bytes, told: str) -> ReadTokenizer | TokenizerError | None:
    """None if it is another one than it is said to be: nothing may be kept under somebody else's hash."""
    if hashlib.sha256(text).hexdigest() != told:
        return None
    try:
        return ReadTokenizer.of(text)
    except TokenizerError as error:
        return error
