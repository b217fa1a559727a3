"""A model's tokenizer from its JSON form, and text to token ids."""

from __future__ import annotations

from tokenizers import Tokenizer


class TokenizerError(ValueError):
    """The bytes are no tokenizer in the `tokenizers` library's JSON form."""


def load_tokenizer(json: bytes) -> Tokenizer:
    """The tokenizer, with padding and truncation off: a prompt is encoded whole or refused, never cut."""
    if not json:
        raise TokenizerError("tokenizer_json: is empty")
    try:
        tokenizer = Tokenizer.from_str(json.decode())
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"tokenizer_json: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of `text`; nothing is added (no beginning-of-sequence token, no template)."""
    return tokenizer.encode(text, add_special_tokens=False).ids
