"""Tokens to text: incremental detokenisation and stop strings. Depends on `tokenizers` only."""

from specwire.text.detokenizer import Detokenizer, TokenizerError, encode, load_tokenizer
from specwire.text.output import MOST_STOP_CHARACTERS, MOST_STOPS, OutputText, Release, StopScanner, check_stops

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
    "load_tokenizer",
]
