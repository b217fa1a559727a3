"""Tool calls and reasoning in a model's text, found while the text comes.

Each family of models writes a call in its own way (`specwire.text.tool_calls.formats`). `OutputParser` is fed the text,
in pieces of any size, and gives events; how the text was cut changes nothing but how events are cut. What is no whole
call is text, never an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from specwire.text.tool_calls.formats import THINK, THOUGHT, ToolFormat
from specwire.text.tool_calls.readers import CallReader, Functions, JsonCall, ToolFunction
from specwire.text.tool_calls.values import SPACE, BrokenCall

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
    """More of the call's arguments, as JSON."""

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
    """arguments: a JSON object."""

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


def merged_events(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """Neighbours of one kind as one."""
    found: list[OutputEvent] = []
    for _, alike in groupby(events, lambda event: (type(event), getattr(event, "index", None))):
        match several := list(alike):
            case [ContentDelta(), _, *_]:
                found.append(ContentDelta("".join(each.text for each in several if isinstance(each, ContentDelta))))
            case [ReasoningDelta(), _, *_]:
                found.append(ReasoningDelta("".join(each.text for each in several if isinstance(each, ReasoningDelta))))
            case [CallDelta(index=index), _, *_]:
                arguments = "".join(each.arguments for each in several if isinstance(each, CallDelta))
                found.append(CallDelta(index, arguments))
            case _:
                found += several
    return found


# ----------------------------------------------------------------------------------------------------------------------
# A text, as it comes.


class ToolParser:
    """Content and calls of one text. functions: those that may be called.

    White space directly before an opener, between calls and behind the last one is no content.
    """

    def __init__(self, form: ToolFormat, functions: Functions) -> None:
        self._form = form
        self._functions = functions
        self._openers = tuple(each for each in (form.opener, form.start) if each)
        self._firsts = frozenset(each[0] for each in self._openers)
        self._take = self._text
        self._events: list[OutputEvent] = []
        # White space, and the beginning of an opener or a closer: both may be content.
        self._space: list[str] = []
        self._mark = ""
        # What has been read of a call, from its opener or the separator before it.
        self._raw: list[str] = []
        self._call: CallReader = JsonCall(functions)
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
        events, self._events = merged_events(self._events), []
        return events

    def _content(self, text: str) -> None:
        whole = self._taken_space() + text
        if whole:
            self._events.append(ContentDelta(whole))
        self._mark = ""
        self._untold = self._behind_call = False

    def _taken_space(self) -> str:
        space = "".join(self._space)
        self._space.clear()
        return space

    def _again(self, text: str) -> None:
        """Read it as text after all."""
        self._take = self._text
        for char in text:
            self._take(char)

    def _text(self, char: str) -> None:
        if not self._mark and char not in self._firsts:
            self._no_mark(char)
            return
        mark = self._mark + char
        if any(opener.startswith(mark) for opener in self._openers):
            self._mark = mark
            if mark == self._form.opener:
                self._opened(mark)
            elif mark == self._form.start:
                self._opened("")
                self._begin(mark)
        else:
            self._mark = ""
            self._no_mark(mark[0])
            for each in mark[1:]:
                self._take(each)

    def _no_mark(self, char: str) -> None:
        """A character that begins no opener."""
        if char in SPACE:
            self._space.append(char)
        elif self._untold and (char in self._form.leads or (self._form.named and self._may_be_named(char))):
            self._opened("")
            self._gap(char)
        else:
            self._content(char)

    def _may_be_named(self, char: str) -> bool:
        return any(name.startswith(char) for name in self._functions)

    def _opened(self, opener: str) -> None:
        self._raw, self._mark = [self._taken_space() + opener], ""
        self._take, self._listed = self._gap, False

    def _gap(self, char: str) -> None:
        """Behind an opener, or what is between two calls."""
        if char in SPACE:
            self._raw.append(char)
        elif char == "[" and "[" in self._form.leads and not self._listed:
            self._listed = True
            self._raw.append(char)
        else:
            self._begin(char)

    def _may_begin(self, text: str) -> bool:
        call = self._form.reader(text[0], self._functions)
        try:
            for char in text:
                call.take(char)
        except BrokenCall:
            return False
        return True

    def _begin(self, text: str) -> None:
        """A call, perhaps, of which this is the beginning."""
        self._call, self._begun = self._form.reader(text[0], self._functions), False
        self._take = self._in_call
        for char in text:
            self._take(char)

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
        """Behind a call."""
        if char in SPACE and not self._mark:
            self._space.append(char)
            return
        self._mark += char
        closers = () if self._listed else self._form.closers
        if self._mark in closers:
            self._take = self._text if self._mark == closers[-1] else self._after
            self._space.clear()
            self._mark = ""
        elif not any(closer.startswith(self._mark) for closer in closers):
            self._goes_on(self._mark)

    def _goes_on(self, mark: str) -> None:
        """What is no closer: the list's end, one more call, or text."""
        space, self._mark = self._taken_space(), ""
        if self._listed and mark == "]":
            self._listed = False
            self._take = self._after if self._form.closers else self._text
        elif mark == ("," if self._listed else ";" if self._form.chained else ""):
            self._raw, self._take = [space + mark], self._gap
        elif self._form.chained and not self._listed and self._may_begin(mark):
            self._raw = [space]
            self._begin(mark)
        else:
            self._again(space + mark)


class ReasoningSplitter:
    """What stands between <think> and </think> at a text's start, without white space around it, and what follows.

    inside: the prompt has opened it; a model may do so again.
    """

    def __init__(self, inside: bool) -> None:
        self._take = self._inside if inside else self._before
        # White space, and behind it the beginning of a mark.
        self._space: list[str] = []
        self._mark = ""
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
        held = self._held()
        if self._take == self._before:
            self._rest.append(held)
        elif self._take == self._inside:
            self._reasoning.append(held.rstrip(SPACE))
        return self._given()

    def _held(self) -> str:
        """What was held, which is no more."""
        held, self._mark = "".join(self._space) + self._mark, ""
        self._space.clear()
        return held

    def _is_space(self, char: str) -> bool:
        """It is held, as such before a mark."""
        if self._mark or char not in SPACE:
            return False
        self._space.append(char)
        return True

    def _given(self) -> tuple[str, str]:
        given = "".join(self._reasoning), "".join(self._rest)
        self._reasoning, self._rest = [], []
        return given

    def _before(self, char: str) -> None:
        if self._is_space(char):
            return
        self._mark += char
        if self._mark == THINK:
            self._held()
            self._take = self._inside
        elif not THINK.startswith(self._mark):
            self._rest.append(self._held())
            self._take = self._outside

    def _inside(self, char: str) -> None:
        if self._is_space(char):
            return
        self._mark += char
        if self._mark == THOUGHT:
            self._held()
            self._take = self._behind
            return
        if self._mark == THINK and self._empty:
            self._held()
            return
        while self._mark and not self._may_be_mark():
            first, rest = self._mark[0], self._mark[1:]
            self._mark = ""
            space = self._held()
            self._reasoning.append(("" if self._empty else space) + first)
            self._empty = False
            self._mark = rest.lstrip(SPACE)
            self._space += rest[: len(rest) - len(self._mark)]

    def _may_be_mark(self) -> bool:
        return THOUGHT.startswith(self._mark) or (self._empty and THINK.startswith(self._mark))

    def _behind(self, char: str) -> None:
        if char not in SPACE:
            self._rest.append(char)
            self._take = self._outside

    def _outside(self, char: str) -> None:
        self._rest.append(char)


class OutputParser:
    """Reasoning, content and calls of one text.

    Args:
        form, functions: of calls, and those that may be called; None for a text that has none.
        thinking: the prompt has opened the model's reasoning; None: the model has none.
    """

    def __init__(self, form: ToolFormat | None, functions: Sequence[ToolFunction], thinking: bool | None) -> None:
        self._tools = None if form is None else ToolParser(form, Functions(functions))
        self._reasoning = None if thinking is None else ReasoningSplitter(thinking)

    def feed(self, text: str) -> list[OutputEvent]:
        if self._reasoning is None:
            return self._plain(text)
        reasoning, rest = self._reasoning.feed(text)
        return self._both(reasoning, rest)

    def finish(self) -> list[OutputEvent]:
        events = self._both(*self._reasoning.finish()) if self._reasoning is not None else []
        return merged_events([*events, *(self._tools.finish() if self._tools is not None else ())])

    def _both(self, reasoning: str, rest: str) -> list[OutputEvent]:
        first: list[OutputEvent] = [ReasoningDelta(reasoning)] if reasoning else []
        return [*first, *self._plain(rest)]

    def _plain(self, text: str) -> list[OutputEvent]:
        if self._tools is not None:
            return self._tools.feed(text)
        return [ContentDelta(text)] if text else []
