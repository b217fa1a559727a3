"""One call of a function in a model's text, a character at a time: as JSON, behind its name, as Python.

However a family writes a call, what is read of it are a name and arguments as JSON. A reader takes characters until it
is `done`. Text that cannot go on to be a call of a known function raises BrokenCall. `xml` has those in tags.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specwire.text.tool_calls.values import (
    HEX,
    MOST_DEPTH,
    MOST_DIGITS,
    NUMBER,
    SPACE,
    BrokenCall,
    PythonValue,
    SchemaTypes,
    quoted,
)

LITERAL = re.compile(rf"true|false|null|{NUMBER.pattern}")
IN_LITERAL = frozenset("0123456789+-.eEtrufalsn")


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """parameters: the arguments' JSON schema, of an object. strict: calls must meet it."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


class Heads(Mapping[str, str]):
    """What calls may begin with, and whose each is: the function's name. Of one that several have, the longest name."""

    def __init__(self, heads: Iterable[tuple[str, str]]) -> None:
        self._names = dict(sorted(heads, key=lambda head: len(head[1])))
        self._sorted = sorted(self._names)

    def __getitem__(self, head: str) -> str:
        return self._names[head]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def lead_from(self, text: str) -> bool:
        """Whether one of them begins so."""
        at = bisect_left(self._sorted, text)
        return at < len(self._sorted) and self._sorted[at].startswith(text)


class Functions(dict[str, ToolFunction]):
    """Those that may be called, by name. What readers look up of them is made once, not for each call."""

    def __init__(self, functions: Sequence[ToolFunction]) -> None:
        super().__init__({each.name: each for each in functions})
        self._heads: dict[Hashable, Heads] = {}
        self._types: dict[str, SchemaTypes] = {}

    def heads(self, form: Hashable, written: Callable[[str], Iterable[str]] = lambda name: (name,)) -> Heads:
        """written: how calls of a function begin in this form."""
        if form not in self._heads:
            self._heads[form] = Heads((head, name) for name in self for head in written(name))
        return self._heads[form]

    def types(self, name: str) -> SchemaTypes:
        """Of a function's arguments."""
        if name not in self._types:
            self._types[name] = SchemaTypes(self[name].parameters)
        return self._types[name]


# Characters of an argument's name.
MOST_KEY = 256


class CallReader:
    """Reads one call. functions: those that may be called, by name.

    `name` is None until it is known. `fresh()` gives the arguments as they come.
    """

    def __init__(self, functions: Functions) -> None:
        self.name: str | None = None
        self.done = False
        self._functions = functions
        self._step: Callable[[str], None] = self._begin
        self._arguments: list[str] = []
        self._told = 0

    def take(self, char: str) -> None:
        """Raises BrokenCall."""
        self._step(char)

    def fresh(self) -> str:
        """Arguments that were not given yet."""
        text = "".join(self._arguments[self._told :])
        self._told = len(self._arguments)
        return text

    def _begin(self, char: str) -> None:
        raise NotImplementedError

    def _ended(self) -> None:
        """Close the object that the arguments were put together to."""
        self._arguments.append("}" if self._arguments else "{}")
        self.done = True


# ----------------------------------------------------------------------------------------------------------------------
# JSON (RFC 8259). Arguments stay as the model writes them.

ARGUMENTS = ("arguments", "parameters")
# Characters between a name and its arguments.
MOST_HEAD = 64


class JsonCall(CallReader):
    """An object with the function's name and, as one of `ARGUMENTS`, its arguments."""

    # How deep the members lie that are read: those of the object itself.
    members_at = 1

    def __init__(self, functions: Functions) -> None:
        super().__init__(functions)
        self._stack: list[str] = []
        self._is_key = False
        self._literal = ""
        self._hex = 0
        # Of the object itself: the newest key, and the text of a key, the name or the arguments while they come.
        self._key: str | None = None
        self._member: list[str] | None = None

    def take(self, char: str) -> None:
        member = self._member
        if member is not None:
            member.append(char)
        try:
            self._step(char)
        except BrokenCall:
            if member is not None:
                member.pop()
            raise

    def _begin(self, char: str) -> None:
        if char != "{":
            raise BrokenCall
        self._enter(char)

    def _enter(self, char: str) -> None:
        if len(self._stack) == MOST_DEPTH:
            raise BrokenCall
        self._stack.append(char)
        self._step = self._first_key if char == "{" else self._first_item

    def _leave(self, char: str) -> None:
        if self._stack.pop() + char not in ("{}", "[]"):
            raise BrokenCall
        if self._stack:
            self._value_ended()
        else:
            self._ended()

    def _ended(self) -> None:
        if self.name is None:
            raise BrokenCall
        self._arguments = self._arguments or ["{}"]
        self.done = True

    def _first_key(self, char: str) -> None:
        if char == "}":
            self._leave(char)
        else:
            self._key_begins(char)

    def _key_begins(self, char: str) -> None:
        if char in SPACE:
            return
        if char != '"':
            raise BrokenCall
        self._is_key, self._step = True, self._string
        if len(self._stack) == self.members_at:
            self._member = [char]

    def _first_item(self, char: str) -> None:
        if char == "]":
            self._leave(char)
        else:
            self._value(char)

    def _value(self, char: str) -> None:
        if char in SPACE:
            return
        if len(self._stack) == self.members_at:
            self._member_begins(char)
        if char == '"':
            self._is_key, self._step = False, self._string
        elif char in "{[":
            self._enter(char)
        elif char in IN_LITERAL:
            self._literal, self._step = char, self._in_literal
        else:
            raise BrokenCall

    def _member_begins(self, char: str) -> None:
        if self._key == "name":
            if char != '"' or self.name is not None:
                raise BrokenCall
            self._member = [char]
        elif self._key in ARGUMENTS:
            if char != "{" or self._arguments:
                raise BrokenCall
            self._member = self._arguments = [char]

    def _string(self, char: str) -> None:
        if char == '"':
            if self._is_key:
                self._key_ended()
            else:
                self._value_ended()
        elif char == "\\":
            self._step = self._escape
        elif char < " ":
            raise BrokenCall

    def _escape(self, char: str) -> None:
        if char == "u":
            self._hex, self._step = 0, self._in_hex
        elif char in '"\\/bfnrt':
            self._step = self._string
        else:
            raise BrokenCall

    def _in_hex(self, char: str) -> None:
        if char not in HEX:
            raise BrokenCall
        self._hex += 1
        if self._hex == 4:
            self._step = self._string

    def _key_ended(self) -> None:
        self._step = self._colon
        if len(self._stack) == self.members_at and self._member is not None:
            self._key, self._member = json.loads("".join(self._member)), None

    def _colon(self, char: str) -> None:
        if char == ":":
            self._step = self._value
        elif char not in SPACE:
            raise BrokenCall

    def _in_literal(self, char: str) -> None:
        if char in IN_LITERAL and len(self._literal) < MOST_DIGITS:
            self._literal += char
            return
        if not LITERAL.fullmatch(self._literal):
            raise BrokenCall
        self._value_ended()
        self._step(char)

    def _value_ended(self) -> None:
        self._step = self._after
        if len(self._stack) > self.members_at or self._member is None:
            return
        if self._key == "name":
            name = json.loads("".join(self._member))
            if name not in self._functions:
                raise BrokenCall
            self.name = name
        self._member = None

    def _after(self, char: str) -> None:
        if char == ",":
            self._step = self._key_begins if self._stack[-1] == "{" else self._value
        elif char in "}]":
            self._leave(char)
        elif char not in SPACE:
            raise BrokenCall


class NamedCall(JsonCall):
    """The function's name, then the arguments as a JSON object.

    Args:
        befores: what may stand before the name. between: what stands between it and the arguments.
        marked: between them may stand Mistral's marks, and a call's id, each with or without its mark: a detokeniser
            leaves special tokens out.
        numbered: `between` begins with a colon and a number, of whatever value.
    """

    # The whole object is the arguments: no member of it is read.
    members_at = 0
    marks = re.compile(r"(\[CALL_ID\])?([a-zA-Z0-9]{9})?(\[ARGS\])?")
    # What begins as they do.
    mark = re.compile(r"[a-zA-Z0-9_\[\]]{0,24}")
    number = re.compile(r"^:[0-9]{1,9}\s{0,8}")

    def __init__(
        self, functions: Functions, befores: tuple[str, ...], between: str, marked: bool, numbered: bool
    ) -> None:
        super().__init__(functions)
        self._heads = functions.heads(befores, lambda name: (before + name for before in befores))
        self._marked = marked
        self._numbered = numbered
        self._between = self._without_number(between)
        self._head = ""
        # Where in it one of `_heads` ends.
        self._ends: list[int] = []

    def _begin(self, char: str) -> None:
        if char == "{":
            self.name = self._named()
            self._member = self._arguments = [char]
            self._enter(char)
            return
        self._head += char
        if self._head in self._heads:
            self._ends.append(len(self._head))
        rests = (self._head[end:] for end in self._ends)
        if not self._heads.lead_from(self._head) and not any(map(self._may_stand_between, rests)):
            raise BrokenCall

    def _named(self) -> str:
        """The function whose head it is; of several the one with the longest name."""
        found = [end for end in self._ends if self._stands_between(self._head[end:].rstrip(SPACE))]
        if not found:
            raise BrokenCall
        return max((self._heads[self._head[:end]] for end in found), key=len)

    def _without_number(self, text: str) -> str:
        return self.number.sub(":", text) if self._numbered else text

    def _stands_between(self, text: str) -> bool:
        if self._marked:
            return self.marks.fullmatch(text) is not None
        return self._without_number(text) == self._between.rstrip(SPACE)

    def _may_stand_between(self, text: str) -> bool:
        if self._marked:
            return self.mark.fullmatch(text) is not None
        plain = self._without_number(text)
        return self._between.startswith(plain) or (
            plain.rstrip(SPACE) == self._between.rstrip(SPACE) and len(text) <= MOST_HEAD
        )

    def _ended(self) -> None:
        self._member, self.done = None, True


# ----------------------------------------------------------------------------------------------------------------------
# Python, as Llama 4 writes it.


class PythonCall(CallReader):
    """NAME(KEY=VALUE, ...)."""

    def __init__(self, functions: Functions) -> None:
        super().__init__(functions)
        self._word = ""
        self._value = PythonValue()

    def _begin(self, char: str) -> None:
        if char == "(":
            if self._word not in self._functions:
                raise BrokenCall
            self.name, self._step = self._word, self._key_or_end
            return
        self._word += char
        if not self._functions.heads("").lead_from(self._word):
            raise BrokenCall

    def _key_or_end(self, char: str) -> None:
        if char == ")":
            self._ended()
        elif char.isidentifier():
            self._word, self._step = char, self._key
        elif char not in SPACE:
            raise BrokenCall

    def _key(self, char: str) -> None:
        if char == "=" or char in SPACE:
            self._step = self._equals
            self._equals(char)
        elif len(self._word) == MOST_KEY or not (self._word + char).isidentifier():
            raise BrokenCall
        else:
            self._word += char

    def _equals(self, char: str) -> None:
        if char == "=":
            self._arguments.append(f'{", " if self._arguments else "{"}"{quoted(self._word)}": ')
            self._value, self._step = PythonValue(), self._in_value
        elif char not in SPACE:
            raise BrokenCall

    def _in_value(self, char: str) -> None:
        taken = self._value.take(char)
        self._arguments.append(self._value.fresh())
        if self._value.done:
            self._step = self._after
        if not taken:
            self._after(char)

    def _after(self, char: str) -> None:
        if char == ",":
            self._step = self._key_or_end
        elif char == ")":
            self._ended()
        elif char not in SPACE:
            raise BrokenCall
