"""Calls in texts: found alike however a text is cut, equal to what a reader of the whole text finds; else text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specwire.core.law.constraint import Constraint, ConstraintKind
from specwire.text.constraint_process import Grammars
from specwire.text.tool_calls.formats import FORMATS, THOUGHT, ChatFamily
from specwire.text.tool_calls.grammar import call_grammar
from specwire.text.tool_calls.parser import (
    CallBegun,
    CallDelta,
    CallEnded,
    ContentDelta,
    OutputEvent,
    OutputParser,
    ParsedCall,
    ParsedOutput,
    ReasoningDelta,
    gathered,
)
from specwire.text.tool_calls.readers import ToolFunction
from tests.text.tokenizers_for_tests import byte_level

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"$ref": "#/$defs/Unit"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": ["C", "F"]}},
}
FUNCTIONS = [ToolFunction("get_weather", SCHEMA, strict=True), ToolFunction("f", {"type": "object"})]
FORMAT_NAMES = sorted(FORMATS)


def events_of(
    form: str | None,
    pieces: list[str],
    thinking: bool | None = None,
    functions: Sequence[ToolFunction] = FUNCTIONS,
) -> list[OutputEvent]:
    parser = OutputParser(FORMATS[form] if form else None, functions, thinking)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return [*events, *parser.finish()]


def parsed(form: str | None, text: str, thinking: bool | None = None) -> ParsedOutput:
    return gathered(events_of(form, [text], thinking))


def told(events: list[OutputEvent]) -> list[Any]:
    """What a client that merges deltas has at the end: by kind, and calls by index."""
    calls: dict[int, list[Any]] = {}
    content = reasoning = ""
    for event in events:
        match event:
            case ContentDelta():
                content += event.text
            case ReasoningDelta():
                reasoning += event.text
            case CallBegun():
                assert event.index == len(calls)
                calls[event.index] = [event.name, "", None]
            case CallDelta():
                assert event.arguments
                calls[event.index][1] += event.arguments
            case CallEnded():
                calls[event.index][2] = event.whole
    assert all(ended is not None for _, _, ended in calls.values())
    return [reasoning, content, calls]


WEATHER = '{"city": "Köln}", "days": [1, -2.5e3, true, null], "o": {"a\\"": "\\u00e9\\n"}}'
WHOLE = [
    ("hermes", f'Well.\n<tool_call>\n{{"name": "f", "arguments": {WEATHER}}}\n</tool_call>', "Well.", [("f", WEATHER)]),
    (
        "hermes",
        '<tool_call>{"arguments": {}, "name": "f"}</tool_call>\n<tool_call>\n{"name": "get_weather"}\n</tool_call>\n',
        "",
        [("f", "{}"), ("get_weather", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("hermes", '<<tool_call>{"name": "f"} <tool_call>{"name": "f"}</tool_call>.', "<.", [("f", "{}"), ("f", "{}")]),
    ("llama3", f'{{"name": "f", "parameters": {WEATHER}}}', "", [("f", WEATHER)]),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "f"}', "", [("f", "{}"), ("f", "{}")]),
    ("llama3", '\n{"type": "function", "name": "f", "parameters": {}}\n', "", [("f", "{}")]),
    ("mistral", f'[TOOL_CALLS][{{"name": "f", "arguments": {WEATHER}, "id": "x9"}}]', "", [("f", WEATHER)]),
    ("mistral", '[{"name": "f", "arguments": {}}, {"name": "get_weather"}]', "", [("f", "{}"), ("get_weather", "{}")]),
    ("mistral", 'So: [TOOL_CALLS] [{"name": "f", "arguments": {}}]', "So:", [("f", "{}")]),
    ("json", ' {"name": "f", "arguments": {"x": [[]]}} ', "", [("f", '{"x": [[]]}')]),
    ("json", '[{"name": "f", "parameters": {}}, {"name": "f"}]', "", [("f", "{}"), ("f", "{}")]),
]
# Texts in which nothing is called.
PLAIN = [
    ("hermes", "Hello <tool_cal there"),
    ("hermes", '<tool_call>{"name": "g", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "a"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\n"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1}}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>\n[{"name": "f"}]</tool_call>  \n'),
    ("hermes", '{"name": "f", "arguments": {}}'),
    ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a": ' * 200),
    ("llama3", 'Call {"name": "f", "parameters": {}}'),
    ("llama3", '{"name": "Bob", "age": 5}'),
    ("mistral", "[TOOL_CALL] [1, 2]"),
    ("json", "[1, 2, 3]"),
    ("json", '{"name": "f", "arguments": {"x": 1'),
    ("json", "  \n"),
    ("json", ""),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), WHOLE)
def test_whole_calls(form: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parsed(form, text) == ParsedOutput("", content, tuple(ParsedCall(*call) for call in calls))


@pytest.mark.parametrize(("form", "text"), PLAIN)
def test_what_is_no_call_is_text(form: str, text: str) -> None:
    assert parsed(form, text) == ParsedOutput("", text, ())


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nWell. \n</think>\n\nYes.", False, "Well.", "Yes."),
        ("Well. </thin </think> Yes.", True, "Well. </thin", "Yes."),
        ("\n<think></think>Yes.", False, "", "Yes."),
        ("<thin", False, "", "<thin"),
        ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
        ("Well. </thi", True, "Well. </thi", ""),
        ("  a  b  ", True, "a  b", ""),
    ],
)
def test_reasoning(text: str, inside: bool, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        assert gathered(events_of(None, pieces, inside)) == ParsedOutput(reasoning, content, ())


def test_reasoning_before_a_call() -> None:
    text = '<think>I <tool_call> now.</think>\n<tool_call>{"name": "f"}</tool_call>'
    assert parsed("hermes", text, False) == ParsedOutput("I <tool_call> now.", "", (ParsedCall("f", "{}"),))


def test_a_call_is_told_while_it_comes() -> None:
    parser = OutputParser(FORMATS["hermes"], FUNCTIONS, None)
    assert parser.feed('<tool_call>{"name": "f') == []
    assert parser.feed('", "arguments": {"a"') == [CallBegun(0, "f"), CallDelta(0, '{"a"')]
    assert parser.feed(": 1}") == [CallDelta(0, ": 1}")]
    (ended,) = parser.feed("}")
    assert isinstance(ended, CallEnded)
    assert ended.whole
    assert parser.feed("</tool_call>") == parser.finish() == []


# What texts are made of, so that examples are calls, nearly.
PIECES = [mark for each in FORMATS.values() for mark in (each.opener, each.start, *each.closers, each.between)]
PIECES += [
    '{"name": "f", "arguments": ',
    '{"name": "f"}',
    '{"parameters": {}, "name": "get_weather"}',
    WEATHER,
    "}",
    "]",
]
PIECES += ["<function=f>", "\n<parameter=city>\n", "Köln", "\n</parameter>", "</function>", "f(", "city=", "'a'", ")"]
PIECES += ["<arg_key>city</arg_key>", "<arg_value>", "</arg_value>", "functions.f:0", "<|tool_call_argument_begin|>"]
PIECES += ['<｜DSML｜parameter name="city" string="true">', "</｜DSML｜parameter>", "</｜DSML｜invoke>", 'f">']
PIECES += ["f{", "get_weather", "[ARGS]", "[CALL_ID]", "abcdefghi", "<｜tool▁sep｜>", "```json\n"]
PIECES += ["[", ", ", "; ", "\n", " ", "<think>", "</think>", "<", "text", '"', "\\", "1", "{", ":", '"name"', "\ud800"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(FORMAT_NAMES), TEXTS, st.sampled_from([None, False, True]), st.data())
def test_how_a_text_is_cut_changes_nothing(form: str, text: str, thinking: bool | None, data: st.DataObject) -> None:
    whole = events_of(form, [text], thinking)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for cut in (pieces, list(text)):
        found = events_of(form, cut, thinking)
        assert told(found) == told(whole)
        assert gathered(found) == gathered(whole)
    for call in gathered(whole).calls:
        assert call.name in ("f", "get_weather")
        assert isinstance(json.loads(call.arguments), dict)


def reference(text: str) -> ParsedOutput | None:
    """Hermes' calls as a reader of the whole text finds them; None where one is malformed."""
    calls, content = [], []
    for index, part in enumerate(re.split(r"\s*<tool_call>(.*?)</tool_call>", text, flags=re.DOTALL)):
        if index % 2 == 0:
            content.append(part)
            continue
        found = json.loads(part)
        calls.append(ParsedCall(found["name"], json.dumps(found["arguments"])))
    kept = [part for index, part in enumerate(content) if index == 0 or part.strip()]
    return ParsedOutput("", "".join(kept), tuple(calls))


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["", "Hm.", "So: 5 < 6."]), st.dictionaries(st.text(max_size=5), VALUES, max_size=3))
    ).filter(lambda asked: "tool_call>" not in json.dumps(asked))  # of which the reference knows only one kind
)
def test_as_a_reader_of_the_whole_text_finds_them(asked: list[tuple[str, dict[str, Any]]]) -> None:
    text = "".join(
        f"{content}\n<tool_call>\n{json.dumps({'name': 'f', 'arguments': arguments})}\n</tool_call>"
        for content, arguments in asked
    )
    assert parsed("hermes", text) == reference(text)


def test_families_are_known_by_their_templates() -> None:
    found = {
        "{{ tools }} <tool_call> </think>": ("hermes", True, True),
        "[TOOL_CALLS] [AVAILABLE_TOOLS]{{ tools | tojson }}": ("mistral", True, False),
        "<|start_header_id|>{{ tools }}": ("llama3", True, False),
        "<|header_start|>{{ tools }}": ("llama3", True, False),
        "<|header_start|>{{ tools }} use [func_name1(a=b)]": ("pythonic", True, False),
        "{{ tools }} <tool_call> <function=a> </think>": ("qwen3_coder", True, True),
        "[TOOL_CALLS]{{ name }}[ARGS]{{ tools }}": ("mistral_args", True, False),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function ```json": ("deepseek_v3", False, False),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜> </think>": ("deepseek_v31", False, True),
        "{{ tools }} <tool_call> <arg_key>k</arg_key>\n<arg_value> </think>": ("glm45", True, True),
        "{{ tools }} <tool_call> <arg_key>k</arg_key><arg_value> </think>": ("glm47", True, True),
        "{{ tools }} <｜DSML｜function_calls> </think>": ("deepseek_v32", True, True),
        "{{ tools }} <｜DSML｜tool_calls>": ("deepseek_v4", True, False),
        "{{ tools }} <|tool_calls_section_begin|><|tool_call_begin|>": ("kimi_k2", True, False),
        "<|im_start|>": ("json", False, False),
        "": ("json", False, False),
    }
    for template, known in found.items():
        family = ChatFamily.of(template)
        assert (family.format.name, family.tells, family.thinks) == known
    assert ChatFamily.of("<tool_call>", "json").format.name == "json"


RIGHT, WRONG = {"city": "Bonn", "unit": "C"}, {"city": "Bonn", "unit": "K"}


@pytest.mark.parametrize("form", FORMAT_NAMES)
@pytest.mark.parametrize("thinking", [False, True])
def test_what_a_grammar_allows(form: str, thinking: bool) -> None:
    tokenizer = byte_level()
    grammars = Grammars(tokenizer.to_str().encode(), tokenizer.get_vocab_size(), [0])
    known = FORMATS[form]
    thought = "Hm <x>.</think>\n" if thinking else ""

    def call(*calls: tuple[str, dict[str, Any]]) -> str:
        return known.written(calls)

    def allowed(forced: bool, several: bool, text: str) -> bool:
        grammar = call_grammar(known, FUNCTIONS, forced, several, thinking)
        ids = [*tokenizer.encode(thought + text).ids, 0]
        constraint = Constraint(ConstraintKind.GRAMMAR, (grammar,), THOUGHT if thinking else "")
        return grammars.begin(constraint).take(ids) == len(ids)

    one, two = call(("get_weather", RIGHT)), call(("get_weather", RIGHT), ("f", {"x": [1]}))
    for several in (False, True):
        for forced in (False, True):
            assert allowed(forced, several, one)
            assert allowed(forced, several, two) is several
            assert not allowed(forced, several, call(("get_weather", WRONG)))
            if forced or known.name != "mistral_args":  # there it is text: nothing but its name makes it a call
                assert not allowed(forced, several, call(("g", {})))
            for text in ("", "Nice <weather>.", 'It is "C".'):
                assert allowed(forced, several, text) is not forced
        assert [each.name for each in parsed(form, two).calls] == ["get_weather", "f"]
        if known.opener and known.leads:
            assert not allowed(False, several, f"So {known.opener}")
        if known.start:
            assert not allowed(False, several, f"So {known.start}")
        if known.named:
            assert not allowed(False, several, 'get_weather{"city": 5}')
