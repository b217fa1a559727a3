"""Tokens to text: incremental detokenisation, stop strings, tool calls, constraints on a text's form. No torch."""

from specwire.text.output import (
    MOST_STOP_CHARACTERS,
    MOST_STOPS,
    Detokenizer,
    OutputText,
    Release,
    StopScanner,
    check_stops,
)
from specwire.text.tokenizer import TokenizerError, encode, encode_aside, load_tokenizer, longest_token

__all__ = [
    "MOST_STOPS",
    "MOST_STOP_CHARACTERS",
    "Detokenizer",
    "OutputText",
    "Release",
    "StopScanner",
    "TokenizerError",
    "check_stops",
    "encode",
    "encode_aside",
    "load_tokenizer",
    "longest_token",
]
