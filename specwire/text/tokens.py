"""The bytes of one token."""

from __future__ import annotations

from tokenizers import Tokenizer

from specwire.text.detokenizer import BYTE_OF, BYTE_TOKEN

# A word's beginning in tokenizers that spell spaces so (SentencePiece).
SPACE = "\u2581"


class TokenBytes:
    """What each token stands for by itself: part of a character perhaps, or a special token's own name."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        self._byte_level = "ByteLevel" in type(tokenizer.decoder).__name__

    def of(self, token: int) -> bytes:
        """Empty for an id that has no token."""
        content = self._tokenizer.id_to_token(token)
        if content is None:
            return b""
        if token in self._added:
            return content.encode()
        if BYTE_TOKEN.fullmatch(content):
            return bytes([int(content[3:5], 16)])
        if self._byte_level and set(content) <= BYTE_OF.keys():
            return bytes(BYTE_OF[character] for character in content)
        return content.replace(SPACE, " ").encode()

    def text(self, token: int) -> str:
        return self.of(token).decode(errors="replace")
