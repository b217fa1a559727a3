"""A model's tokenizer: from its JSON form, text to token ids, and the bytes that one token stands for."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping

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
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if highest >= len(text):  # what is made of a vocabulary has a place for each id
        raise TokenizerError(f"tokenizer_json: has an id of {highest} in {len(text)} bytes, which name fewer tokens")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of `text`; nothing is added (no beginning-of-sequence token, no template)."""
    return tokenizer.encode(text, add_special_tokens=False).ids


# Characters of text from which encoding takes long enough for others of an event loop to feel it.
LONG_TEXT = 4096


async def encode_aside(tokenizer: Tokenizer, text: str) -> list[int]:
    """`encode`, without holding up the event loop."""
    if len(text) < LONG_TEXT:
        return encode(tokenizer, text)
    # Only the library's calls for batches release the interpreter's lock; the fast one does not keep where tokens lie.
    batch = await asyncio.to_thread(tokenizer.encode_batch_fast, [text], add_special_tokens=False)
    return list(batch[0].ids)


def longest_token(tokenizer: Tokenizer) -> int:
    """The most bytes of text that one token may stand for."""
    # One byte more for each token: the separator that tokenizers of words drop.
    return 1 + max((len(token.encode()) for token in tokenizer.get_vocab()), default=0)


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
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


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
