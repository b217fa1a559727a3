"""One call of a function in a model's text, a character at a time: as JSON, behind its name, as Python, in tags.

However a family writes a call, what is read of it are a name and arguments as JSON. A reader takes characters until it
is `done`. Text that cannot go on to be a call of a known function raises BrokenCall.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specwire.text.tool_calls.values import (
    ANY_TYPE,
    ONLY_TEXT,
    SPACE,
    BrokenCall,
    JsonValue,
    PythonValue,
    SchemaTypes,
    SpacedValue,
    quoted,
    typed,
)


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """parameters: the arguments' JSON schema, of an object. strict: calls must meet it."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


class CallHeads(dict[str, str]):
    """What calls may begin with, and whose each is: the function's name. Of one that several have, the longest name."""

    def __init__(self, heads: Iterable[tuple[str, str]]) -> None:
        super().__init__(sorted(heads, key=lambda head: len(head[1])))
        self._sorted = sorted(self)

    def lead_from(self, text: str) -> bool:
        """Whether one of them begins so."""
        at = bisect_left(self._sorted, text)
        return at < len(self._sorted) and self._sorted[at].startswith(text)


class Functions(dict[str, ToolFunction]):
    """Those that may be called, by name. What readers look up of them is made once, not for each call."""

    def __init__(self, functions: Sequence[ToolFunction]) -> None:
        super().__init__({each.name: each for each in functions})
        self._heads: dict[Hashable, CallHeads] = {}
        self._types: dict[str, SchemaTypes] = {}

    def heads(self, form: Hashable, written: Callable[[str], Iterable[str]] = lambda name: (name,)) -> CallHeads:
        """written: how calls of a function begin in this form."""
        if form not in self._heads:
            self._heads[form] = CallHeads((head, name) for name in self for head in written(name))
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
# JSON. Arguments stay as the model writes them.

ARGUMENTS = ("arguments", "parameters")
# Characters between a name and its arguments.
MOST_HEAD = 64


class JsonCall(CallReader):
    """An object with the function's name and, as one of `ARGUMENTS`, its arguments."""

    def __init__(self, functions: Functions) -> None:
        super().__init__(functions)
        self._member = ""
        self._value = JsonValue()

    def _begin(self, char: str) -> None:
        if char != "{":
            raise BrokenCall
        self._step = self._key_or_end

    def _key_or_end(self, char: str) -> None:
        if char == "}":
            self._ended()
        else:
            self._key(char)

    def _key(self, char: str) -> None:
        if char == '"':
            self._value, self._step = JsonValue(), self._in_key
            self._in_key(char)
        elif char not in SPACE:
            raise BrokenCall

    def _in_key(self, char: str) -> None:
        self._value.take(char)
        if self._value.done:
            self._member, self._step = self._read(), self._colon

    def _colon(self, char: str) -> None:
        if char == ":":
            self._step = self._first
        elif char not in SPACE:
            raise BrokenCall

    def _first(self, char: str) -> None:
        """Of a member's value."""
        if char in SPACE:
            return
        self._value, self._step = JsonValue(), self._in_value
        if self._member == "name" and (char != '"' or self.name is not None):
            raise BrokenCall
        if self._member in ARGUMENTS:
            if char != "{" or self._arguments:
                raise BrokenCall
            self._value = JsonValue(self._arguments)
        self._in_value(char)

    def _in_value(self, char: str) -> None:
        taken = self._value.take(char)
        if not self._value.done:
            return
        self._step = self._after
        if self._member == "name":
            name = self._read()
            if name not in self._functions:
                raise BrokenCall
            self.name = name
        if not taken:
            self._after(char)

    def _read(self) -> str:
        """The text that a whole value is."""
        return str(json.loads("".join(self._value.parts)))

    def _after(self, char: str) -> None:
        if char == ",":
            self._step = self._key
        elif char == "}":
            self._ended()
        elif char not in SPACE:
            raise BrokenCall

    def _ended(self) -> None:
        if self.name is None:
            raise BrokenCall
        self._arguments = self._arguments or ["{}"]
        self.done = True


class NamedCall(CallReader):
    """The function's name, then the arguments as a JSON object.

    Args:
        befores: what may stand before the name. between: what stands between it and the arguments.
        marked: between them may stand Mistral's marks, and a call's id, each with or without its mark: a detokeniser
            leaves special tokens out.
        numbered: `between` begins with a colon and a number, of whatever value.
    """

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
        self._value = JsonValue(self._arguments)

    def _begin(self, char: str) -> None:
        if char == "{":
            self.name, self._step = self._named(), self._in_arguments
            self._in_arguments(char)
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

    def _in_arguments(self, char: str) -> None:
        self._value.take(char)
        self.done = self._value.done


# ----------------------------------------------------------------------------------------------------------------------
# Python, as Llama 4 writes it.


class PythonCall(CallReader):
    """NAME(KEY=VALUE, ...)."""

    def __init__(self, functions: Functions) -> None:
        super().__init__(functions)
        self._word = ""
        self._value = PythonValue(self._arguments)

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
            self._value, self._step = PythonValue(self._arguments), self._in_value
        elif char not in SPACE:
            raise BrokenCall

    def _in_value(self, char: str) -> None:
        taken = self._value.take(char)
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


# ----------------------------------------------------------------------------------------------------------------------
# Tags, as Qwen3-Coder, GLM and DeepSeek V3.2 write them. The references are vLLM's parsers `qwen3_coder`, `glm45`,
# `glm47` and `deepseek_v32`.

WHITE = re.compile(r"[ \t\r\n]+")
# What no key has; where in a value something may begin that ends it.
NO_KEY, MARK = re.compile(r"[<>\n]"), re.compile(r"[<\n]")
# Characters that may wait for what follows them.
MOST_HELD = 512
# What may follow a call of Qwen's, whose last value has no closing tag.
CALL_END = "</tool_call>"


def one_line(text: str) -> str:
    """With white space of any length as one line break: how tags are compared."""
    return WHITE.sub("\n", text)


@dataclass(frozen=True)
class XmlTags:
    """What stands around the parts of a call, with the white space that the family writes. A reader takes any.

    Attributes:
        function, named: around the function's name.
        key: before an argument's key.
        text, json: between the key and a value that is text, or JSON. Where they are equal, the schema tells which.
        value_end, end: behind each value; behind all of them.
    """

    function: str
    named: str
    key: str
    text: str
    json: str
    value_end: str
    end: str

    @property
    def marked(self) -> bool:
        """A call tells by itself which values are JSON."""
        return self.text != self.json

    @property
    def lines(self) -> bool:
        """Each value stands between line breaks, which are none of it; then its closing tag may lack."""
        return self.value_end.startswith("\n")

    @cached_property
    def closing(self) -> str:
        return self.end.strip()

    @cached_property
    def next_key(self) -> str:
        return one_line(self.key)

    @cached_property
    def key_ends(self) -> Mapping[str, bool]:
        """What ends a key, without white space: whether the value behind it is JSON."""
        return {WHITE.sub("", self.json): True, WHITE.sub("", self.text): False}

    @cached_property
    def value_ends(self) -> tuple[str, ...]:
        """How a value ends: by its closing tag and what follows that, because code may hold such a tag by itself."""
        ends = [
            f"{line}{one_line(self.value_end).strip()}{gap}{following}"
            for line in (("", "\n") if self.lines else ("",))
            for gap in ("", "\n")
            for following in (self.next_key, self.closing)
        ]
        return (*ends, *(f"\n{self.closing}{gap}{CALL_END}" for gap in ("", "\n") if self.lines))

    @cached_property
    def marks(self) -> re.Pattern[str]:
        """What is not written within a text."""
        return re.compile("|".join(map(re.escape, self.forbidden)))

    @property
    def forbidden(self) -> tuple[str, ...]:
        return self.key, self.value_end.strip(), self.closing


QWEN = XmlTags("<function=", ">\n", "<parameter=", ">\n", ">\n", "\n</parameter>\n", "</function>")
ARGUMENT, ARGUMENT_END = "<arg_value>", "</arg_value>"
IN_LINES, IN_ONE_LINE = f"</arg_key>\n{ARGUMENT}", f"</arg_key>{ARGUMENT}"
GLM45 = XmlTags("", "\n", "<arg_key>", IN_LINES, IN_LINES, f"{ARGUMENT_END}\n", CALL_END)
GLM47 = XmlTags("", "", "<arg_key>", IN_ONE_LINE, IN_ONE_LINE, ARGUMENT_END, CALL_END)
DSML = XmlTags(
    '<｜DSML｜invoke name="',
    '">\n',
    '<｜DSML｜parameter name="',
    '" string="true">',
    '" string="false">',
    "</｜DSML｜parameter>\n",
    "</｜DSML｜invoke>\n",
)


class XmlCall(CallReader):
    """The function's name, then keys and values, in these tags.

    A value is what its tag says, or has the type that the function's schema gives it; without either it is a string.
    """

    def __init__(self, functions: Functions, tags: XmlTags) -> None:
        super().__init__(functions)
        self._tags = tags
        self._heads = functions.heads(tags, lambda name: [one_line(f"{tags.function}{name}{tags.named.strip()}")])
        self._held = ""
        self._schema_types = SchemaTypes({})
        self._properties: Mapping[str, Any] = {}
        # Of the argument that comes. is_text: it is told while it comes. is_json: its tag says so.
        self._types = ONLY_TEXT
        self._is_text = self._is_json = False
        self._value: list[str] = []
        self._watched = SpacedValue()
        self._given: set[str] = set()

    def _begin(self, char: str) -> None:
        named = self._tags.named.strip()
        if not named and self._held and (char == "<" or char in SPACE):  # nothing else ends the name
            self._called(self._held)
            self._inside(char)
            return
        seen = self._seen(char)
        if named and seen in self._heads:
            self._called(seen)
        elif not self._heads.lead_from(seen):
            raise BrokenCall

    def _seen(self, char: str) -> str:
        """What is held with this one. Of white space any length is read as one, but not without end."""
        self._held += char
        if len(self._held) > MOST_HELD:
            raise BrokenCall
        return one_line(self._held)

    def _called(self, head: str) -> None:
        if head not in self._heads:
            raise BrokenCall
        self.name, self._held, self._step = self._heads[head], "", self._inside
        self._schema_types = self._functions.types(self.name)
        properties = self._schema_types.resolved(self._functions[self.name].parameters).get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}

    def _inside(self, char: str) -> None:
        """Between arguments."""
        if not self._held and char in SPACE:
            return
        seen = self._seen(char)
        if seen == self._tags.closing:
            self._ended()
        elif seen == self._tags.next_key:
            self._held, self._step = "", self._key
        elif not (self._tags.closing.startswith(seen) or self._tags.next_key.startswith(seen)):
            raise BrokenCall

    def _key(self, char: str) -> None:
        self._held += char
        ends = self._tags.key_ends
        key, mark, rest = self._held.partition(self._tags.text[0])
        seen = WHITE.sub("", mark + rest)
        if NO_KEY.search(key) or (mark and not key.strip()) or len(self._held) > MOST_KEY:
            raise BrokenCall
        if seen in ends:
            self._value_begins(key.strip(), ends[seen])
        elif not any(end.startswith(seen) for end in ends):
            raise BrokenCall

    def _value_begins(self, key: str, is_json: bool) -> None:
        schema = self._properties.get(key)
        self._is_json = self._tags.marked and is_json
        if self._is_json:
            self._types, self._is_text = self._schema_types.of(schema, otherwise=ANY_TYPE), False
        else:
            self._types = ONLY_TEXT if self._tags.marked else self._schema_types.of(schema)
            self._is_text = self._types <= ONLY_TEXT
        self._given.add(key)
        opening = '"' if self._is_text else ""
        self._arguments.append(f'{", " if self._arguments else "{"}"{quoted(key)}": {opening}')
        self._value, self._watched, self._held = [], SpacedValue(), ""
        self._step = self._first if self._tags.lines else self._in_value

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
            seen = self._held[0] + one_line(self._held[1:])
            if self._ends_value(seen):
                self._value_ended(seen)
                return
            if len(self._held) < MOST_HELD and self._may_be_an_end(seen):
                return
            found = MARK.search(self._held, 1)
            end = len(self._held) if found is None else found.start()
            for each in self._held[:end]:
                self._add(each)
            self._held = self._held[end:]

    def _ends_value(self, seen: str) -> bool:
        """A list or an object may have a tag within one of its strings, though no line break."""
        if seen not in self._tags.value_ends:
            return bool(self._next_key(seen))
        has_strings = self._watched.first in (("[", "{", '"') if self._is_json else ("[", "{"))
        return seen.startswith("\n") or not has_strings or not self._watched.in_string

    def _may_be_an_end(self, seen: str) -> bool:
        if any(end.startswith(seen) for end in self._tags.value_ends):
            return True
        following = f"\n{self._tags.next_key}"
        if not self._tags.lines or not (following.startswith(seen) or seen.startswith(following)):
            return False
        return not seen[len(following) :].endswith((">", "\n")) and len(seen) <= len(following) + MOST_KEY

    def _next_key(self, seen: str) -> str:
        """The key of the next argument, where the value before it has no closing tag: one that is still missing."""
        following = f"\n{self._tags.next_key}"
        found = self._tags.lines and seen.startswith(following) and seen.endswith(">")
        key = seen[len(following) : -1] if found else ""
        return key if key in self._properties and key not in self._given else ""

    def _add(self, char: str) -> None:
        if self._is_text:
            self._arguments.append(quoted(char))
        else:
            self._value.append(char)
            self._watched.take(char)

    def _value_ended(self, end: str) -> None:
        self._arguments.append('"' if self._is_text else self._typed("".join(self._value)))
        if end.endswith(self._tags.next_key):
            self._held, self._step = "", self._key
        elif key := self._next_key(end):
            self._value_begins(key, is_json=False)
        else:
            self._ended()

    def _typed(self, text: str) -> str:
        found = self._watched.as_json()
        return found if self._is_json and found.startswith('"') else typed(text, self._types, found)
