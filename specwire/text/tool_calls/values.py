"""Values in calls: as Python or JSON writes them, or as text whose type a schema tells."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

SPACE = " \t\n\r"
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
HEX = frozenset("0123456789abcdefABCDEF")
# Deeper arguments, and longer numbers, are no call: who reads them as JSON need not bear more.
MOST_DEPTH, MOST_DIGITS = 100, 400


class BrokenCall(Exception):
    """The text cannot go on to be a call."""


def quoted(text: str) -> str:
    """The text within a JSON string. Half a character, which no text of a tokenizer has, becomes an escape."""
    return "".join(json.dumps(char)[1:-1] if char in '"\\' or _is_special(char) else char for char in text)


def _is_special(char: str) -> bool:
    return char < " " or "\ud800" <= char <= "\udfff"


class PythonValue:
    """A value as Python or JSON writes it: strings, numbers, True, False, None, lists, dictionaries by strings.

    parts: gets it as JSON while it comes; given by whoever puts it into more.
    """

    quotes = "'\""
    words: Mapping[str, str] = {each: each for each in ("true", "false", "null")} | {
        "True": "true",
        "False": "false",
        "None": "null",
    }
    in_word = frozenset("0123456789+-.eE").union(*words)
    escapes: Mapping[str, str] = {each: rf"\{each}" for each in 'ntrbf\\"'} | {
        "'": "'",
        "/": "/",
        "a": r"\u0007",
        "v": r"\u000b",
        "0": r"\u0000",
    }
    # By how many digits follow.
    codes: Mapping[str, int] = {"x": 2, "u": 4, "U": 8}

    def __init__(self, parts: list[str] | None = None) -> None:
        self.done = False
        self.parts: list[str] = [] if parts is None else parts
        self._stack: list[str] = []
        self._step: Callable[[str], None] = self._value
        self._quote, self._is_key = "", False
        self._word = ""
        self._code, self._digits = 0, ""
        self._comma = ""

    def take(self, char: str) -> bool:
        """Whether it is part of the value: a number, for one, ends with what is not. Raises BrokenCall."""
        if self._step == self._in_word and char not in self.in_word:
            self._word_ended()
            if self.done:
                return False
        self._step(char)
        return True

    @property
    def in_string(self) -> bool:
        return self._step in (self._string, self._escape, self._in_code)

    def _give(self, text: str) -> None:
        self.parts.append(self._comma + text)
        self._comma = ""

    def _value(self, char: str) -> None:
        if char in SPACE:
            return
        if char in self.quotes:
            self._string_begins(char, is_key=False)
        elif char in "[{":
            self._enter(char)
        elif char in self.in_word:
            self._word, self._step = char, self._in_word
        else:
            raise BrokenCall

    def _string_begins(self, char: str, is_key: bool) -> None:
        self._quote, self._is_key, self._step = char, is_key, self._string
        self._give('"')

    def _enter(self, char: str) -> None:
        if len(self._stack) == MOST_DEPTH:
            raise BrokenCall
        self._stack.append(char)
        self._give(char)
        self._step = self._item_or_end if char == "[" else self._key_or_end

    def _leave(self, char: str) -> None:
        if self._stack.pop() + char not in ("{}", "[]"):
            raise BrokenCall
        self._comma = ""  # a last one has nothing behind it
        self._give(char)
        self._value_ended()

    def _item_or_end(self, char: str) -> None:
        if char == "]":
            self._leave(char)
        else:
            self._value(char)

    def _key_or_end(self, char: str) -> None:
        if char == "}":
            self._leave(char)
        else:
            self._key(char)

    def _key(self, char: str) -> None:
        if char in self.quotes:
            self._string_begins(char, is_key=True)
        elif char not in SPACE:
            raise BrokenCall

    def _string(self, char: str) -> None:
        if char == self._quote:
            self._give('"')
            if self._is_key:
                self._step = self._colon
            else:
                self._value_ended()
        elif char == "\\":
            self._step = self._escape
        elif char < " " and char != "\t":
            raise BrokenCall
        else:
            self._give(quoted(char))

    def _escape(self, char: str) -> None:
        if char in self.codes:
            self._code, self._digits, self._step = self.codes[char], "", self._in_code
            return
        if char < " ":
            raise BrokenCall
        self._give(self.escapes.get(char) or quoted("\\" + char))  # Python keeps what is no escape
        self._step = self._string

    def _in_code(self, char: str) -> None:
        if char not in HEX:
            raise BrokenCall
        self._digits += char
        if len(self._digits) < self._code:
            return
        value = int(self._digits, 16)
        if value > 0x10FFFF:
            raise BrokenCall
        self._give(f"\\u{value:04x}" if value <= 0xFFFF else chr(value))
        self._step = self._string

    def _colon(self, char: str) -> None:
        if char == ":":
            self._give(": ")
            self._step = self._value
        elif char not in SPACE:
            raise BrokenCall

    def _in_word(self, char: str) -> None:
        if len(self._word) == MOST_DIGITS:
            raise BrokenCall
        self._word += char

    def _word_ended(self) -> None:
        found = self.words.get(self._word) or (self._word if NUMBER.fullmatch(self._word) else "")
        if not found:
            raise BrokenCall
        self._give(found)
        self._value_ended()

    def _value_ended(self) -> None:
        self.done, self._step = not self._stack, self._after

    def _after(self, char: str) -> None:
        if char == ",":
            self._comma_came()
        elif char in "]}":
            self._leave(char)
        elif char not in SPACE:
            raise BrokenCall

    def _comma_came(self) -> None:
        self._comma = ", "
        self._step = self._item_or_end if self._stack[-1] == "[" else self._key_or_end


class JsonValue(PythonValue):
    """A value as JSON alone (RFC 8259): it stays as the model writes it, white space and all."""

    quotes = '"'
    words: Mapping[str, str] = {each: each for each in ("true", "false", "null")}
    in_word = frozenset("0123456789+-.eE").union(*words)
    escapes: Mapping[str, str] = {each: each for each in '"\\/bfnrt'}
    codes: Mapping[str, int] = {"u": 4}

    def take(self, char: str) -> bool:
        taken = super().take(char)
        if taken:
            self.parts.append(char)
        return taken

    def _give(self, text: str) -> None:
        """It has been given as it came."""

    def _string(self, char: str) -> None:
        if char in '"\\':
            super()._string(char)
        elif char < " ":
            raise BrokenCall

    def _escape(self, char: str) -> None:
        if char not in self.codes and char not in self.escapes:
            raise BrokenCall
        super()._escape(char)

    def _comma_came(self) -> None:
        """Nothing ends behind one."""
        self._step = self._value if self._stack[-1] == "[" else self._key


class SpacedValue:
    """A value as Python or JSON writes it, or anything else, while it comes. White space at its ends is none of it.

    first: its first character, "" before that.
    """

    def __init__(self) -> None:
        self.first = ""
        self._value = PythonValue()
        self._space: list[str] = []
        self._broken = False

    def take(self, char: str) -> None:
        if char.isspace():
            if self.first:
                self._space.append(char)
            return
        self.first = self.first or char
        for each in (*self._space, char):
            self._broken = self._broken or self._ends(each)
        self._space.clear()

    def _ends(self, char: str) -> bool:
        """Whether the value cannot go on with it."""
        try:
            return self._value.done or not self._value.take(char)
        except BrokenCall:
            return True

    @property
    def in_string(self) -> bool:
        """Whether the value breaks off within one of its strings."""
        return not self._broken and self._value.in_string

    def as_json(self) -> str:
        """At its end: "" where it is no value."""
        whole = not self._broken and self._ends(" ") and self._value.done
        return "".join(self._value.parts) if whole else ""


# ----------------------------------------------------------------------------------------------------------------------
# What a schema says of a value, for families that write values without their types.

OF_VALUES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    dict: "object",
    list: "array",
}
ANY_TYPE = frozenset(OF_VALUES.values())
ONLY_TEXT = frozenset(["string"])


ANYTHING: Mapping[str, Any] = {}


# Stands for what a schema leaves open, and for types that JSON does not have.
OPEN, OTHER = "", "other"


class SchemaTypes:
    """Types of the values that the schemas within `root` describe. Each of them is walked once, however often asked."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._referred: dict[str, Mapping[str, Any]] = {}
        self._kinds: dict[int, frozenset[str]] = {}

    def resolved(self, schema: object) -> Mapping[str, Any]:
        """The schema, or what it refers to; `ANYTHING` where that is none."""
        way: dict[str, None] = {}
        while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
            reference = schema["$ref"]
            if reference in self._referred:
                schema = self._referred[reference]
                break
            if reference in way or not reference.startswith("#"):
                schema = ANYTHING
                break
            way[reference] = None
            schema = self._root
            for name in reference.split("/")[1:]:
                name = name.replace("~1", "/").replace("~0", "~")
                schema = schema.get(name) if isinstance(schema, Mapping) else None
        found = schema if isinstance(schema, Mapping) else ANYTHING
        self._referred.update(dict.fromkeys(way, found))
        return found

    def of(self, schema: object, otherwise: frozenset[str] = ONLY_TEXT) -> frozenset[str]:
        """Names of the JSON types that a value may have; where the schema leaves it open, `otherwise`."""
        found = self.resolved(schema)
        if id(found) not in self._kinds:
            self._learn(found)
        kinds = self._kinds[id(found)]
        return kinds - {OPEN} | otherwise if OPEN in kinds else kinds

    def _learn(self, schema: Mapping[str, Any]) -> None:
        """Its types, and those of the schemas that it branches into: each one's flow to all that lead to it."""
        kinds: dict[int, set[str]] = {id(schema): set()}
        leading: dict[int, list[int]] = {id(schema): []}
        order = [schema]
        for each in order:
            branches = [self.resolved(branch) for branch in branches_of(each)]
            kinds[id(each)] |= _own_types(each) or (set() if branches else {OPEN})
            for branch in branches:
                if id(branch) in self._kinds:
                    kinds[id(each)] |= self._kinds[id(branch)]
                    continue
                if id(branch) not in kinds:
                    kinds[id(branch)], leading[id(branch)] = set(), []
                    order.append(branch)
                leading[id(branch)].append(id(each))
        todo = [id(each) for each in order]
        while todo:
            known = todo.pop()
            for before in leading[known]:
                if not kinds[known] <= kinds[before]:
                    kinds[before] |= kinds[known]
                    todo.append(before)
        self._kinds.update((each, frozenset(found)) for each, found in kinds.items())


def branches_of(schema: Mapping[str, Any]) -> list[object]:
    """Schemas of which a value meets one, or all; none where the schema tells the type by itself."""
    if _own_types(schema):
        return []
    return next((list(schema[name]) for name in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(name), list)), [])


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind if kind in ANY_TYPE else OTHER}
    if isinstance(kind, list):
        return {each if each in ANY_TYPE else OTHER for each in kind if isinstance(each, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return {OF_VALUES.get(type(value), "string") for value in values}
    implied = {"properties": "object", "items": "array"}
    return {kind for name, kind in implied.items() if name in schema}


def typed(text: str, types: frozenset[str], found: str) -> str:
    """A value as JSON, of the first of these types that the text can have, else a string: as vLLM reads one.

    found: the value that the text is as Python or JSON writes one; "" for none. A word that is no truth value stays a
    string, too.
    """
    plain = text.strip()
    lower = plain.lower()
    if lower in ("null", "none") and ("null" in types or "string" not in types):
        return "null"
    if "boolean" in types and lower in ("true", "false"):
        return lower
    is_number = len(plain) <= MOST_DIGITS and NUMBER.fullmatch(plain) is not None
    if is_number and ("number" in types or ("integer" in types and plain.lstrip("-").isdecimal())):
        return plain
    if ("object" if found.startswith("{") else "array" if found.startswith("[") else "") in types:
        return found
    return f'"{quoted(text)}"'
