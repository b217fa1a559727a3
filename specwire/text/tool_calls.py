"""Tool calls and reasoning in a model's text: found while the text comes, and demanded of it by a grammar.

Each family of models writes a call in its own way (`FORMATS`). `OutputParser` is fed the text, in pieces of any size,
and gives events; how the text was cut changes nothing but how events are cut. What is no whole call is text, never an
error. `call_grammar` is the other way round: the texts whose calls have the arguments that were asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes a call; all of them as a JSON object with the function's name and its arguments.

    Attributes:
        opener, closer: around each call, or before all of them; "": none. An opener that is a special token may lack in
            a text, as detokenisers leave those out: such formats lead, too.
        leads: a text that begins with such an object, or a list of them, is a call without an opener.
        arguments: the key of the arguments, as the family writes it; each of `ARGUMENTS` is read.
        before, between, behind: as the family writes several.
    """

    name: str
    opener: str = ""
    closer: str = ""
    leads: bool = True
    arguments: str = "arguments"
    before: str = ""
    between: str = ""
    behind: str = ""


FORMATS = {
    each.name: each
    for each in (
        ToolFormat(
            "hermes",
            opener="<tool_call>",
            closer="</tool_call>",
            leads=False,
            before="<tool_call>\n",
            between="\n</tool_call>\n<tool_call>\n",
            behind="\n</tool_call>",
        ),
        ToolFormat("llama3", opener="<|python_tag|>", arguments="parameters", between="; "),
        ToolFormat("mistral", opener="[TOOL_CALLS]", before="[", between=", ", behind="]"),
        ToolFormat("json", before="[", between=", ", behind="]"),
    )
}
ARGUMENTS = ("arguments", "parameters")
# What only the templates of one family say.
SIGNS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": "<|start_header_id|>"}
THINK, THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ChatFamily:
    """What a chat template tells of its model.

    tells: it writes tools into the prompt by itself. thinks: the model may write its reasoning first.
    """

    format: ToolFormat
    tells: bool
    thinks: bool

    @classmethod
    def of(cls, template: str, named: str = "") -> ChatFamily:
        """named: of `FORMATS`; "": as the template says, else "json"."""
        found = named or next((name for name, sign in SIGNS.items() if sign in template), "json")
        return cls(FORMATS[found], re.search(r"\btools\b", template) is not None, THOUGHT in template)


# ----------------------------------------------------------------------------------------------------------------------
# Events, and what they come to.


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """index: of the call among the answer's, from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of the call's arguments, as the model writes them."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """whole: its arguments are a JSON object. raw: the call's text, for whoever has not told of one that is not."""

    index: int
    whole: bool
    raw: str


OutputEvent = ReasoningDelta | ContentDelta | CallBegun | CallDelta | CallEnded


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """arguments: a JSON object as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """A whole answer; a call that broke off is part of the content."""

    reasoning: str
    content: str
    calls: tuple[ParsedCall, ...]


def gathered(events: Iterable[OutputEvent]) -> ParsedOutput:
    """What all events of one text come to."""
    reasoning, content = "", ""
    begun: dict[int, tuple[str, list[str]]] = {}
    calls = []
    for event in events:
        match event:
            case ReasoningDelta():
                reasoning += event.text
            case ContentDelta():
                content += event.text
            case CallBegun():
                begun[event.index] = event.name, []
            case CallDelta():
                begun[event.index][1].append(event.arguments)
            case CallEnded(whole=True):
                name, arguments = begun[event.index]
                calls.append(ParsedCall(name, "".join(arguments)))
            case CallEnded():
                content += event.raw
    return ParsedOutput(reasoning, content, tuple(calls))


def _merged(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """Neighbours of one kind as one."""
    found: list[OutputEvent] = []
    for event in events:
        last = found[-1] if found else None
        match last, event:
            case ContentDelta(), ContentDelta():
                found[-1] = ContentDelta(last.text + event.text)
            case ReasoningDelta(), ReasoningDelta():
                found[-1] = ReasoningDelta(last.text + event.text)
            case CallDelta(), CallDelta() if last.index == event.index:
                found[-1] = CallDelta(last.index, last.arguments + event.arguments)
            case _:
                found.append(event)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# JSON, a character at a time (RFC 8259).

SPACE = " \t\n\r"
LITERAL = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
IN_LITERAL = frozenset("0123456789+-.eEtrufalsn")
# Deeper arguments, and longer numbers, are no call: who reads them as JSON need not bear more.
MOST_DEPTH, MOST_DIGITS = 100, 400


class BrokenCall(Exception):
    """The text cannot go on to be a call."""


class CallText:
    """One call's object.

    names: of functions that may be called. Afterwards `done`, with `name`; `fresh()` gives its arguments as they come.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.name: str | None = None
        self.done = False
        self._names = names
        self._stack: list[str] = []
        self._step: Callable[[str], None] = self._begin
        self._is_key = False
        self._literal = ""
        self._hex = 0
        # Of the object itself: the newest key, and the text of a key, the name or the arguments while they come.
        self._key: str | None = None
        self._member: list[str] | None = None
        self._arguments: list[str] = []
        self._told = 0

    def take(self, char: str) -> None:
        """Raises BrokenCall."""
        member = self._member
        if member is not None:
            member.append(char)
        try:
            self._step(char)
        except BrokenCall:
            if member is not None:
                member.pop()
            raise

    def fresh(self) -> str:
        """Arguments that were not given yet."""
        text = "".join(self._arguments[self._told :])
        self._told = len(self._arguments)
        return text

    def _begin(self, char: str) -> None:
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
        if len(self._stack) == 1:
            self._member = [char]

    def _first_item(self, char: str) -> None:
        if char == "]":
            self._leave(char)
        else:
            self._value(char)

    def _value(self, char: str) -> None:
        if char in SPACE:
            return
        if len(self._stack) == 1:
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
        if char not in "0123456789abcdefABCDEF":
            raise BrokenCall
        self._hex += 1
        if self._hex == 4:
            self._step = self._string

    def _key_ended(self) -> None:
        self._step = self._colon
        if len(self._stack) == 1 and self._member is not None:
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
        if len(self._stack) > 1 or self._member is None:
            return
        if self._key == "name":
            name = json.loads("".join(self._member))
            if name not in self._names:
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


# ----------------------------------------------------------------------------------------------------------------------
# A text, as it comes.


class ToolParser:
    """Content and calls of one text. names: of functions that may be called.

    White space directly before an opener, between calls and behind the last one is no content.
    """

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        self._form = form
        self._names = frozenset(names)
        self._take = self._text
        self._events: list[OutputEvent] = []
        # White space and the beginning of an opener, which may be content.
        self._space, self._mark = "", ""
        # What has been read of a call, from its opener or the separator before it.
        self._raw: list[str] = []
        self._call = CallText(self._names)
        self._listed = False
        self._calls = 0
        self._begun = False
        # Nothing but white space yet, at all or since the last call.
        self._untold, self._behind_call = True, False

    def feed(self, text: str) -> list[OutputEvent]:
        for char in text:
            self._take(char)
        if self._take == self._in_call:
            self._tell()
        return self._given()

    def finish(self) -> list[OutputEvent]:
        """What is left at the text's end."""
        if self._take == self._in_call:
            self._give_up()
        elif self._take == self._gap:
            self._content("".join(self._raw))
        elif self._take == self._text and (self._mark or not self._behind_call):
            self._content(self._mark)
        return self._given()

    def _given(self) -> list[OutputEvent]:
        events, self._events = _merged(self._events), []
        return events

    def _content(self, text: str) -> None:
        if self._space + text:
            self._events.append(ContentDelta(self._space + text))
        self._space = self._mark = ""
        self._untold = self._behind_call = False

    def _again(self, text: str) -> None:
        """Read it as text after all."""
        self._take = self._text
        for char in text:
            self._take(char)

    def _text(self, char: str) -> None:
        mark, form = self._mark + char, self._form
        if form.opener.startswith(mark):
            self._mark = mark
            if mark == form.opener:
                self._opened(mark)
        elif self._mark:
            released, self._mark = self._mark + char, ""
            self._no_mark(released[0])
            for each in released[1:]:
                self._take(each)
        else:
            self._no_mark(char)

    def _no_mark(self, char: str) -> None:
        """A character that begins no opener."""
        if char in SPACE:
            self._space += char
        elif self._form.leads and self._untold and char in "{[":
            self._opened("")
            self._gap(char)
        else:
            self._content(char)

    def _opened(self, opener: str) -> None:
        self._raw = [self._space + opener]
        self._space = self._mark = ""
        self._take, self._listed = self._gap, False

    def _gap(self, char: str) -> None:
        """Behind an opener, or what is between two calls."""
        if char == "{":
            self._begin(char)
        elif char in SPACE:
            self._raw.append(char)
        elif char == "[" and self._form.leads and not self._listed:
            self._listed = True
            self._raw.append(char)
        else:
            self._content("".join(self._raw))
            self._again(char)

    def _begin(self, char: str) -> None:
        self._raw.append(char)
        self._call, self._begun, self._take = CallText(self._names), False, self._in_call
        self._call.take(char)

    def _in_call(self, char: str) -> None:
        try:
            self._call.take(char)
        except BrokenCall:
            self._give_up()
            self._again(char)
            return
        self._raw.append(char)
        if self._call.done:
            self._tell()
            self._end(whole=True)
            self._take, self._behind_call = self._after, True

    def _tell(self) -> None:
        """As much of the call as is known; nothing before its name is."""
        call = self._call
        if call.name is None:
            return
        if not self._begun:
            self._begun = True
            self._events.append(CallBegun(self._calls, call.name))
        arguments = call.fresh()
        if arguments:
            self._events.append(CallDelta(self._calls, arguments))

    def _give_up(self) -> None:
        """It is no call: text, as far as it was not told as one."""
        if self._call.name is None:
            self._content("".join(self._raw))
        else:
            self._tell()
            self._end(whole=False)
        self._untold = self._behind_call = False

    def _end(self, whole: bool) -> None:
        self._events.append(CallEnded(self._calls, whole, "".join(self._raw)))
        self._raw = []
        self._calls += 1
        self._untold = False

    def _after(self, char: str) -> None:
        """Behind a call's object."""
        self._raw.append(char)
        seen = "".join(self._raw)
        closer = self._form.closer
        if closer:
            if closer == seen.lstrip(SPACE):
                self._raw, self._take = [], self._text
            elif not closer.startswith(seen.lstrip(SPACE)):
                self._raw = []
                self._again(seen)
        elif char == "]" and self._listed:
            self._raw, self._take = [], self._text
        elif char == ("," if self._listed else ";"):
            self._take = self._gap
        elif char == "{" and not self._listed:
            self._raw.pop()
            self._begin(char)
        elif char not in SPACE:
            self._raw = []
            self._again(seen)


class ReasoningSplitter:
    """What stands between <think> and </think> at a text's start, without white space around it, and what follows.

    inside: the prompt has opened it.
    """

    def __init__(self, inside: bool) -> None:
        self._take = self._inside if inside else self._before
        self._held = ""
        self._empty = True
        self._reasoning: list[str] = []
        self._rest: list[str] = []

    def feed(self, text: str) -> tuple[str, str]:
        """More reasoning, more of the rest."""
        if self._take == self._outside:
            return "", text
        for char in text:
            self._take(char)
        return self._given()

    def finish(self) -> tuple[str, str]:
        if self._take == self._before:
            self._rest.append(self._held)
        elif self._take == self._inside:
            self._reasoning.append(self._held.rstrip(SPACE))
        self._held = ""
        return self._given()

    def _given(self) -> tuple[str, str]:
        given = "".join(self._reasoning), "".join(self._rest)
        self._reasoning, self._rest = [], []
        return given

    def _before(self, char: str) -> None:
        self._held += char
        seen = self._held.lstrip(SPACE)
        if seen == THINK:
            self._held, self._take = "", self._inside
        elif not THINK.startswith(seen):
            self._rest.append(self._held)
            self._held, self._take = "", self._outside

    def _inside(self, char: str) -> None:
        """Held are white space, and behind it the beginning of the end."""
        self._held += char
        mark = self._held.lstrip(SPACE)
        if mark == THOUGHT:
            self._held, self._take = "", self._behind
            return
        while mark and not THOUGHT.startswith(mark):
            space = self._held[: len(self._held) - len(mark)]
            self._reasoning.append(("" if self._empty else space) + mark[0])
            self._empty = False
            self._held = mark[1:]
            mark = self._held.lstrip(SPACE)

    def _behind(self, char: str) -> None:
        if char not in SPACE:
            self._rest.append(char)
            self._take = self._outside

    def _outside(self, char: str) -> None:
        self._rest.append(char)


class OutputParser:
    """Reasoning, content and calls of one text.

    Args:
        form, names: of calls; None for a text that has none.
        thinking: the prompt has opened the model's reasoning; None: the model has none.
    """

    def __init__(self, form: ToolFormat | None, names: Collection[str], thinking: bool | None) -> None:
        self._tools = None if form is None else ToolParser(form, names)
        self._reasoning = None if thinking is None else ReasoningSplitter(thinking)

    def feed(self, text: str) -> list[OutputEvent]:
        if self._reasoning is None:
            return self._plain(text)
        reasoning, rest = self._reasoning.feed(text)
        return self._both(reasoning, rest)

    def finish(self) -> list[OutputEvent]:
        events = self._both(*self._reasoning.finish()) if self._reasoning is not None else []
        return _merged([*events, *(self._tools.finish() if self._tools is not None else ())])

    def _both(self, reasoning: str, rest: str) -> list[OutputEvent]:
        first: list[OutputEvent] = [ReasoningDelta(reasoning)] if reasoning else []
        return [*first, *self._plain(rest)]

    def _plain(self, text: str) -> list[OutputEvent]:
        if self._tools is not None:
            return self._tools.feed(text)
        return [ContentDelta(text)] if text else []


# ----------------------------------------------------------------------------------------------------------------------
# The texts that are, or may have, calls of given functions: a grammar as llguidance reads Lark.

# Calls of one answer where the grammar demands some: a poor model would never come to an end.
MOST_CALLS = 16
WHITESPACE = r"[ \n\r\t]{0,32}"


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """parameters: the arguments' JSON schema, of an object. strict: calls must meet it."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


def call_grammar(
    form: ToolFormat, functions: Sequence[ToolFunction], forced: bool, several: bool, thinking: bool
) -> str:
    """forced: the text is one call or, with `several`, up to `MOST_CALLS`, and each meets its function's schema.

    Otherwise it is any text that the format does not take for a call, or has calls; those of strict functions meet
    their schema, the others' arguments are an object. thinking: reasoning comes first, up to its end.
    """
    lines = [
        f"start: {'thought GAP ' if thinking else ''}answer",
        f"answer: {'calls' if forced else _free(form, several)}",
        *_call_rules(form, several),
        f"call: {' | '.join(f'call_{index}' for index in range(len(functions)))}",
    ]
    for index, function in enumerate(functions):
        head = json.dumps(f'{{"name": {json.dumps(function.name)}, "{form.arguments}": ')
        schema = function.parameters if forced or function.strict else {"type": "object"}
        lines += [
            f'call_{index}: {head} arguments_{index} "}}"',
            f"arguments_{index}: %json {json.dumps(_spaced(schema))}",
        ]
    if thinking:
        lines += [f"thought[lazy]: TEXT {json.dumps(THOUGHT)}", "GAP: /[ \\n]{0,4}/"]
    lines += [r"TEXT: /(.|\n)*/", ""]
    return "\n".join(lines)


def _call_rules(form: ToolFormat, several: bool) -> list[str]:
    """calls: as they stand at an answer's start."""
    more = f" ({json.dumps(form.between)} call){{0,{MOST_CALLS - 1}}}" if several else ""
    parts = [
        json.dumps(form.before) if form.before else "",
        f"call{more}",
        json.dumps(form.behind) if form.behind else "",
    ]
    return [f"calls: {' '.join(part for part in parts if part)}", *_free_rules(form)]


def _free(form: ToolFormat, several: bool) -> str:
    if form.leads:
        return "PLAIN | calls"
    return "tagged* TEXT" if several else "TEXT | tagged"


def _free_rules(form: ToolFormat) -> list[str]:
    """Rules for texts that may have calls; as of any Lark grammar, one that is not used does no harm."""
    if form.leads:
        elsewhere = rf" & ~/(.|\n)*{re.escape(form.opener)}(.|\n)*/" if form.opener else ""
        return [rf"PLAIN: /([ \n\r\t]*[^ \n\r\t{{\[](.|\n)*)?/{elsewhere}"]
    rest = form.before.removeprefix(form.opener)
    return [
        f"opened[lazy]: TEXT {json.dumps(form.opener)}",
        f"tagged: opened {json.dumps(rest)} call {json.dumps(form.behind)}",
    ]


def _spaced(schema: Mapping[str, Any]) -> dict[str, Any]:
    """With a bound on white space: without one a model may write nothing else."""
    guidance = {"whitespace_pattern": WHITESPACE}
    return {"type": "object", **schema, "x-guidance": {**guidance, **schema.get("x-guidance", {})}}
