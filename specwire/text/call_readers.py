"""One call of a function in a model's text, a character at a time: as JSON, behind its name, as XML, as Python.

However a family writes a call, what is read of it are a name and arguments as JSON. A reader takes characters until it
is `done`. Text that cannot go on to be a call of a known function raises BrokenCall.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specwire.text.call_values import (
    HEX,
    MOST_DEPTH,
    MOST_DIGITS,
    NUMBER,
    SPACE,
    BrokenCall,
    PythonValue,
    as_json,
    quoted,
    resolved,
    typed,
    types_of,
)

LITERAL = re.compile(rf"true|false|null|{NUMBER.pattern}")
IN_LITERAL = frozenset("0123456789+-.eEtrufalsn")


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """parameters: the arguments' JSON schema, of an object. strict: calls must meet it."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


Functions = Mapping[str, ToolFunction]


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
        before, between: what stands before the name, and between it and the arguments.
        marked: between them may stand Mistral's marks, and a call's id, each with or without its mark: a detokeniser
            leaves special tokens out.
    """

    # The whole object is the arguments: no member of it is read.
    members_at = 0
    marks = re.compile(r"(\[CALL_ID\])?([a-zA-Z0-9]{9})?(\[ARGS\])?")
    # What begins as they do.
    mark = re.compile(r"[a-zA-Z0-9_\[\]]{0,24}")

    def __init__(self, functions: Functions, before: str, between: str, marked: bool) -> None:
        super().__init__(functions)
        self._before = before
        self._between = between
        self._marked = marked
        self._head = ""

    def _begin(self, char: str) -> None:
        if char == "{":
            self.name = self._named()
            self._member = self._arguments = [char]
            self._enter(char)
            return
        self._head += char
        if not self._may_be_a_head():
            raise BrokenCall

    def _named(self) -> str:
        """The function whose head it is; of several the one with the longest name."""
        for name in sorted(self._functions, key=len, reverse=True):
            start = self._before + name
            if self._head.startswith(start) and self._stands_between(self._head[len(start) :].rstrip(SPACE)):
                return name
        raise BrokenCall

    def _stands_between(self, text: str) -> bool:
        return self.marks.fullmatch(text) is not None if self._marked else text == self._between.rstrip(SPACE)

    def _may_be_a_head(self) -> bool:
        starts = [self._before + name for name in self._functions]
        rests = [self._head[len(start) :] for start in starts if self._head.startswith(start)]
        return any(start.startswith(self._head) for start in starts) or any(map(self._may_stand_between, rests))

    def _may_stand_between(self, text: str) -> bool:
        if self._marked:
            return self.mark.fullmatch(text) is not None
        return self._between.startswith(text) or (
            text.rstrip(SPACE) == self._between.rstrip(SPACE) and len(text) <= MOST_HEAD
        )

    def _ended(self) -> None:
        self._member, self.done = None, True


# ----------------------------------------------------------------------------------------------------------------------
# XML as Qwen3-Coder writes it; the reference is vLLM's parser `qwen3_coder`.

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
CALL_END = "</tool_call>"
MOST_KEY = 256
# How a value ends, white space written as one line break: by its closing tag and what follows that, because code may
# hold such a tag by itself; or, where the model has forgotten that tag, by the next one.
VALUE_ENDS = tuple(
    [
        f"{line}{PARAMETER_END}{gap}{following}"
        for line in ("", "\n")
        for gap in ("", "\n")
        for following in (PARAMETER, FUNCTION_END)
    ]
    + [f"\n{FUNCTION_END}{gap}{CALL_END}" for gap in ("", "\n")]
)
NEXT = f"\n{PARAMETER}"
WHITE = re.compile(r"[ \t\r\n]+")
MOST_HELD = 512


class XmlCall(CallReader):
    """<function=NAME>, for each argument <parameter=KEY>, a line break, its value, a line break, </parameter>; then
    </function>.

    A value has the type that the function's schema gives it; without one it is a string.
    """

    def __init__(self, functions: Functions) -> None:
        super().__init__(functions)
        self._held = ""
        self._root: Mapping[str, Any] = {}
        self._properties: Mapping[str, Any] = {}
        # Of the argument that comes.
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []
        self._given: set[str] = set()

    @property
    def _is_text(self) -> bool:
        """Its value is told while it comes."""
        return self._types <= {"string"}

    def _begin(self, char: str) -> None:
        self._held += char
        if char == ">":
            self._called(self._held[len(FUNCTION) : -1])
        elif not any(f"{FUNCTION}{name}>".startswith(self._held) for name in self._functions):
            raise BrokenCall

    def _called(self, name: str) -> None:
        if name not in self._functions:
            raise BrokenCall
        self.name, self._held, self._step = name, "", self._inside
        self._root = self._functions[name].parameters
        properties = resolved(self._root, self._root).get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}

    def _inside(self, char: str) -> None:
        """Between arguments."""
        if not self._held and char in SPACE:
            return
        self._held += char
        if self._held == FUNCTION_END:
            self._ended()
        elif self._held == PARAMETER:
            self._held, self._step = "", self._key
        elif not (FUNCTION_END.startswith(self._held) or PARAMETER.startswith(self._held)):
            raise BrokenCall

    def _key(self, char: str) -> None:
        if char == ">" and self._held:
            self._value_begins(self._held)
        elif char in "<>\n" or len(self._held) == MOST_KEY:
            raise BrokenCall
        else:
            self._held += char

    def _value_begins(self, key: str) -> None:
        self._types = types_of(self._properties.get(key), self._root)
        self._given.add(key)
        opening = '"' if self._is_text else ""
        self._arguments.append(f'{", " if self._arguments else "{"}"{quoted(key)}": {opening}')
        self._value, self._held, self._step = [], "", self._first

    def _first(self, char: str) -> None:
        """A value's first character: one line break is none of it."""
        self._step = self._in_value
        if char != "\n":
            self._in_value(char)

    def _in_value(self, char: str) -> None:
        if not self._held and char not in "<\n":
            self._add(char)
            return
        self._held += char
        while self._held:
            seen = self._held[0] + WHITE.sub("\n", self._held[1:])
            if self._ends_value(seen):
                self._value_ended(seen)
                return
            if len(self._held) < MOST_HELD and self._may_be_an_end(seen):
                return
            self._add(self._held[0])
            self._held = self._held[1:]

    def _ends_value(self, seen: str) -> bool:
        """A list or an object may have a tag within one of its strings, though no line break."""
        if seen not in VALUE_ENDS:
            return bool(self._next_key(seen))
        value = "".join(self._value).strip()
        return seen.startswith("\n") or not value.startswith(("[", "{")) or as_json(value) is not None

    def _may_be_an_end(self, seen: str) -> bool:
        if any(end.startswith(seen) for end in (*VALUE_ENDS, NEXT)):
            return True
        return seen.startswith(NEXT) and not seen.endswith((">", "\n")) and len(seen) <= len(NEXT) + MOST_KEY

    def _next_key(self, seen: str) -> str:
        """The key of the next argument, where the value before it has no closing tag: one that is still missing."""
        key = seen[len(NEXT) : -1] if seen.startswith(NEXT) and seen.endswith(">") else ""
        return key if key in self._properties and key not in self._given else ""

    def _add(self, char: str) -> None:
        if self._is_text:
            self._arguments.append(quoted(char))
        else:
            self._value.append(char)

    def _value_ended(self, end: str) -> None:
        self._arguments.append('"' if self._is_text else typed("".join(self._value), self._types))
        if end.endswith(PARAMETER):
            self._held, self._step = "", self._key
        elif end.startswith(NEXT):
            self._value_begins(self._next_key(end))
        else:
            self._ended()

    def _ended(self) -> None:
        self._arguments.append("}" if self._arguments else "{}")
        self.done = True


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
        if not any(name.startswith(self._word) for name in self._functions):
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

    def _ended(self) -> None:
        self._arguments.append("}" if self._arguments else "{}")
        self.done = True
