"""A model's tokenizer from its JSON form, text to token ids, and what makes two vocabularies the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from tokenizers import Tokenizer


class TokenizerError(ValueError):
    """The bytes are no tokenizer in the `tokenizers` library's JSON form."""


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
