"""Tokens to text: incremental detokenisation, stop strings, tool calls, constraints on a text's form. No torch."""
