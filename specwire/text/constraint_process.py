"""`python -m specwire.text.constraint_process CONTROL TOKENIZER VOCABULARY EOS...`: compiles constraints, and answers.

The library's own limits do not notice all that a constraint may cost, at the start or at any later token. So each
constrained session has a process of its own (`specwire.text.sandbox`), forked where library and tokenizer are.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, assert_never

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from specwire.core.invalid import InvalidParameter
from specwire.core.law.constraint import Constraint, ConstraintKind, Mask
from specwire.text.constraints import ANSWER_S, COMPILE_S, MOST_MEMORY
from specwire.text.json_schema import served_grammar, served_schema
from specwire.text.sandbox import limit, receive, send, serve

# ----------------------------------------------------------------------------------------------------------------------
# Constraints by the llguidance library (the extra `constrained`), which walks the tokenizer's vocabulary as a trie of
# bytes: whatever the constraint allows can be written, however the tokenizer cuts it. docs/HTTP.md says how it reads
# constraints.

# White space between the parts of a JSON text; without a bound a model may write nothing else.
WHITESPACE = r"[ \n\r\t]{0,32}"
# The library's defaults, spelt out because they bound what a caller can cost. By its own figures: 20 ms for
# building a lexer, 14 and 3 ms for the lexer and the parser at one token, some 50 MB of lexer states.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=32_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
MOST_SHOWN = 300


class Matching:
    """Implements `specwire.core.law.constraint.Matcher`."""

    def __init__(self, matcher: LLMatcher, eos_ids: Sequence[int], vocabulary: int) -> None:
        self._matcher = matcher
        self._eos_ids = list(eos_ids)
        self._vocabulary = vocabulary
        self._taken = 0
        self._ended = False

    @property
    def length(self) -> int:
        return self._taken + self._ended

    @property
    def trouble(self) -> str:
        return _said(self._matcher.get_error())

    @property
    def broken(self) -> bool:
        return False

    def take(self, tokens: Sequence[int]) -> int:
        """The library is not told of an end of sequence: it need not know it to go back."""
        if self._ended:
            return 0
        inner = list(takewhile(lambda token: token not in self._eos_ids, tokens))
        taken = self._matcher.try_consume_tokens(inner) if inner else 0
        self._taken += taken
        if taken < len(tokens) and taken == len(inner):
            self._ended = self._may_end()
        return taken + self._ended

    def rollback(self, length: int) -> None:
        if length < self.length:
            self._ended = False
        if length < self._taken:
            self._matcher.rollback(self._taken - length)
            self._taken = length

    def masks(self, window: Sequence[int]) -> list[Mask | None]:
        start = self.length
        masks: list[Mask | None] = [None] * (len(window) + 1)
        for index in range(len(masks)):
            if self._ended:
                break
            masks[index] = self._mask()
            if not self.take(window[index : index + 1]):
                break
        self.rollback(start)
        return masks

    def _mask(self) -> Mask:
        """The library's mask; all False where it has given up."""
        if self._matcher.is_error():
            return np.zeros(self._vocabulary, dtype=np.bool_)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, count=self._vocabulary, bitorder="little").view(np.bool_)
        # A tokenizer may have them as ordinary text, which would end the text where the constraint does not allow it.
        mask[self._eos_ids] = self._may_end()
        return mask

    def _may_end(self) -> bool:
        return bool(self._matcher.is_accepting()) and not self._matcher.is_error()


class WrittenMarks:
    """A tokenizer in the form in which the library takes one: its own, with what is written out as ordinary tokens.

    The library takes any added token that is named like `</think>` for a special one, and allows none of those where
    something else may stand as well: a model would have to spell it.

    written: those that it takes for special ones although they are not.
    """

    bos_token_id = None

    def __init__(self, library: LLTokenizer, tokenizer_json: str, eos_ids: Sequence[int]) -> None:
        added = json.loads(tokenizer_json).get("added_tokens", ())
        plain = {each["id"] for each in added if not each["special"]}.difference(eos_ids)
        ids = range(library.vocab_size)
        taken = [each for each in ids if library.is_special_token(each)]
        self.written = plain.intersection(taken)
        self.special_token_ids = [each for each in taken if each not in plain]
        self.tokens = [library.decode_bytes([each]) for each in ids]
        self.eos_token_id = eos_ids[0]
        self._library = library

    def __call__(self, text: str) -> list[int]:
        tokens: list[int] = self._library.tokenize_str(text)
        return tokens


def library_tokenizer(tokenizer_json: str, vocabulary: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """Raises what the library does."""
    made = LLTokenizer(tokenizer_json, n_vocab=vocabulary, eos_token=list(eos_ids))
    marks = WrittenMarks(made, tokenizer_json, eos_ids)
    if not marks.written:
        return made
    return LLTokenizer(TokenizerWrapper(marks), n_vocab=vocabulary, eos_token=list(eos_ids))


class Grammars:
    """Compiles constraints for one model's tokenizer.

    vocabulary: ids of the model; those that the tokenizer does not have are never allowed.
    """

    def __init__(self, tokenizer_json: bytes, vocabulary: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocabulary = vocabulary
        self._eos_ids = tuple(eos_ids)
        self._tokenizer: LLTokenizer | None = None
        self._unfit = ""

    def load(self) -> None:
        """The tokenizer, where it can be used: a second where the vocabulary is large."""
        try:
            known = self._tokenizer_json.decode()
            self._tokenizer = library_tokenizer(known, self._vocabulary, self._eos_ids)
        except Exception as error:  # whatever the library makes of a tokenizer of a kind that it does not know
            self._unfit = f"this model's tokenizer cannot be constrained: {_said(error)}"

    def begin(self, constraint: Constraint) -> Matching:
        """At the start of an output.

        Raises:
            InvalidParameter: the constraint is none, or asks for too much, or the tokenizer cannot be constrained.
        """
        if self._tokenizer is None and not self._unfit:
            self.load()
        if self._tokenizer is None:
            raise constraint.invalid(self._unfit)
        return Matching(_compiled(self._tokenizer, constraint), self._eos_ids, self._vocabulary)


def _compiled(tokenizer: LLTokenizer, constraint: Constraint) -> LLMatcher:
    try:
        matcher = LLMatcher(tokenizer, _grammar(constraint), log_level=0, limits=LIMITS)
    except InvalidParameter:
        raise
    except Exception as error:  # it claims never to raise for a caller's input
        raise constraint.invalid(_said(error)) from error
    if matcher.is_error():
        raise constraint.invalid(_said(matcher.get_error()))
    return matcher


def _grammar(constraint: Constraint) -> str:
    """As the library reads it: the form, and what stands before it, each with a lexer of its own."""
    form = {"name": "form", **_form(constraint)}
    if not constraint.behind:
        return json.dumps({"grammars": [form]})
    return json.dumps({"grammars": [{"lark_grammar": BEHIND.format(json.dumps(constraint.behind))}, form]})


# What is free, up to the first occurrence of a text, and what separates it from the form.
BEHIND = r"""start: before GAP @form
before[lazy]: TEXT {}
TEXT: /(.|\n)*/
GAP: /[ \n]{{0,4}}/
"""


def _form(constraint: Constraint) -> dict[str, Any]:
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            schema = json.dumps(served_schema(json.loads(constraint.text)))
            grammar = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE})
        case ConstraintKind.REGEX:
            grammar = LLMatcher.grammar_from_regex(constraint.text)
        case ConstraintKind.CHOICES:
            return {"lark_grammar": "start: " + " | ".join(json.dumps(text) for text in constraint.texts)}
        case ConstraintKind.GRAMMAR:
            return {"lark_grammar": served_grammar(constraint.text)}
        case _:
            assert_never(constraint.kind)
    (form,) = json.loads(grammar)["grammars"]
    return {**form, "name": "form"}


def _said(said: object) -> str:
    """The library's message on one line."""
    lines = [line.strip() for line in str(said).splitlines() if line.strip()]
    return " ".join(lines)[:MOST_SHOWN]


# ----------------------------------------------------------------------------------------------------------------------
# The process: one session after the fork, until its service closes it.


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    vocabulary, *eos_ids = map(int, sys.argv[3:])
    with os.fdopen(int(sys.argv[2]), "rb") as file:
        grammars = Grammars(file.read(), vocabulary, eos_ids)
    grammars.load()
    serve(control, lambda fd: _session(grammars, fd), MOST_MEMORY)


def _session(grammars: Grammars, fd: int) -> None:
    """One, until its service closes it. Raises Lost."""
    asked, _ = receive(fd)
    limit(COMPILE_S)
    matching = _begun(grammars, asked, fd)
    while matching is not None:
        limit(0.0)
        asked, _ = receive(fd)
        limit(ANSWER_S)
        _answer(matching, asked, fd)


def _begun(grammars: Grammars, asked: dict[str, Any], fd: int) -> Matching | None:
    told = asked["constraint"]
    constraint = Constraint(ConstraintKind(told["kind"]), tuple(told["texts"]), told["behind"])
    try:
        matching = grammars.begin(constraint)
    except InvalidParameter as error:
        send(fd, {"error": str(error).removeprefix(f"{error.field}: ")})
        return None
    send(fd, {"taken": matching.take(asked["output"])})
    return matching


def _answer(matching: Matching, asked: dict[str, Any], fd: int) -> None:
    matching.rollback(asked["back"])
    taken = matching.take(asked["take"])
    masks = [mask for mask in matching.masks(asked["window"]) if mask is not None]
    data = np.packbits(np.stack(masks), axis=1).tobytes() if masks else b""
    send(fd, {"taken": taken, "rows": len(masks), "trouble": matching.trouble}, data)


if __name__ == "__main__":
    main()
