"""The id -> token map, and what makes two of them the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from tokenizers import Tokenizer


def vocabulary_map(tokenizer_json: bytes, width: int) -> dict[int, str]:
    """Token of each id. A model without a tokenizer calls its `width` ids by their numbers."""
    if not tokenizer_json:
        return {index: str(index) for index in range(width)}
    vocabulary: dict[str, int] = Tokenizer.from_str(tokenizer_json.decode()).get_vocab(with_added_tokens=True)
    return {index: token for token, index in vocabulary.items()}


def vocabulary_fingerprint(vocabulary: Mapping[int, str]) -> str:
    """sha256 (hex) of the sorted (id, token) pairs."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()
