"""Calls in texts, as each family writes them: found alike however a text is cut, told as they come; else text."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specwire.core.law.constraint import Constraint, ConstraintKind
from specwire.text.constraint_process import Grammars, Matching
from specwire.text.tool_calls.formats import FORMATS, THOUGHT, ChatFamily, JsonStyle, PythonStyle
from specwire.text.tool_calls.grammar import call_grammar
from specwire.text.tool_calls.parser import (
    CallBegun,
    CallDelta,
    CallEnded,
    OutputEvent,
    OutputParser,
    ParsedCall,
    ParsedOutput,
    gathered,
    merged_events,
)
from specwire.text.tool_calls.readers import ToolFunction
from specwire.text.tool_calls.values import SchemaTypes, SpacedValue, typed
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
    form: str | None, pieces: list[str], thinking: bool | None = None, functions: Sequence[ToolFunction] = FUNCTIONS
) -> list[OutputEvent]:
    parser = OutputParser(FORMATS[form] if form else None, functions, thinking)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return [*events, *parser.finish()]


def parsed(form: str | None, text: str, thinking: bool | None = None) -> ParsedOutput:
    return gathered(events_of(form, [text], thinking))


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


@settings(max_examples=800, deadline=None)
@given(st.sampled_from(FORMAT_NAMES), TEXTS, st.sampled_from([None, False, True]), st.data())
def test_how_a_text_is_cut_changes_nothing(form: str, text: str, thinking: bool | None, data: st.DataObject) -> None:
    whole = events_of(form, [text], thinking)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for cut in (pieces, list(text)):
        found = events_of(form, cut, thinking)
        assert merged_events(found) == merged_events(whole)
    for call in gathered(whole).calls:
        assert call.name in ("f", "get_weather")
        assert isinstance(json.loads(call.arguments), dict)
    if thinking is None and not gathered(whole).calls:
        assert gathered(whole).content == text


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


def begun(grammar: str, behind: str = "") -> Matching:
    tokenizer = byte_level()
    grammars = Grammars(tokenizer.to_str().encode(), tokenizer.get_vocab_size(), [0])
    return grammars.begin(Constraint(ConstraintKind.GRAMMAR, (grammar,), behind))


def takes(matching: Matching, text: str) -> bool:
    """Whether it may be all of the text."""
    ids = [*byte_level().encode(text).ids, 0]
    return matching.take(ids) == len(ids)


def held(form: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls as a grammar has them written: those of Python's form as JSON."""
    known = FORMATS[form]
    return (replace(known, style=JsonStyle()) if isinstance(known.style, PythonStyle) else known).written(calls)


@pytest.mark.parametrize("form", FORMAT_NAMES)
@pytest.mark.parametrize("thinking", [False, True])
def test_what_a_grammar_allows(form: str, thinking: bool) -> None:
    known = FORMATS[form]

    def allowed(forced: bool, several: bool, text: str) -> bool:
        grammar = call_grammar(known, FUNCTIONS, forced, several, thinking)
        if not thinking:
            return takes(begun(grammar), text)
        return takes(begun(grammar, THOUGHT), f"Hm <x>.</think>\n{text}")

    one, two = held(form, ("get_weather", RIGHT)), held(form, ("get_weather", RIGHT), ("f", {"x": [1]}))
    for several in (False, True):
        for forced in (False, True):
            assert allowed(forced, several, one)
            assert allowed(forced, several, two) is several
            assert not allowed(forced, several, held(form, ("get_weather", WRONG)))
            if forced or known.name != "mistral_args":  # there it is text: nothing but its name makes it a call
                assert not allowed(forced, several, held(form, ("g", {})))
            for text in ("", "Nice <weather>.", 'It is "C".'):
                assert allowed(forced, several, text) is not forced
        assert [each.name for each in parsed(form, two).calls] == ["get_weather", "f"]
        if known.opener and known.leads:
            assert not allowed(False, several, f"So {known.opener}")
        if known.start:
            assert not allowed(False, several, f"So {known.start}")
        if known.named:
            assert not allowed(False, several, 'get_weather{"city": 5}')


# ----------------------------------------------------------------------------------------------------------------------
# Calls as each family writes them: at every boundary, broken off anywhere, with values by schema, under grammars.

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "text": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "count": {"type": "integer"},
        "ratio": {"type": ["number", "null"]},
        "force": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "options": {"type": "object"},
        "mode": {"$ref": "#/$defs/Mode"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "anything": {},
    },
    "$defs": {"Mode": {"enum": ["read", "write"]}},
}
WRITERS = [
    ToolFunction("write", PARAMETERS),
    ToolFunction("now", {"type": "object", "properties": {}}),
    ToolFunction("write.twice-a", PARAMETERS),
]


def xml(name: str, **values: str) -> str:
    parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()]
    return f"<function={name}>\n{''.join(parts)}</function>"


CODE = 'if a < b:\n    print("</parameter>", {\'x\': "<function=now>"})\n\n'
LONG = f"<tool_call>\n{xml('write', path='a b.py', text=CODE, count='3')}\n</tool_call>"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
KIMI = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMI_SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
DSML_CALLS = "<｜DSML｜function_calls>\n{}\n</｜DSML｜function_calls>"


def glm(name: str, gap: str = "\n", **values: str) -> str:
    parts = [f"<arg_key>{key}</arg_key>{gap}<arg_value>{value}</arg_value>{gap}" for key, value in values.items()]
    return f"<tool_call>{name}{gap}{''.join(parts)}</tool_call>"


def dsml(name: str, **values: tuple[bool, str]) -> str:
    """values: whether it is a text, and it."""
    parts = [
        f'<｜DSML｜parameter name="{key}" string="{str(is_text).lower()}">{value}</｜DSML｜parameter>\n'
        for key, (is_text, value) in values.items()
    ]
    return f'<｜DSML｜invoke name="{name}">\n{"".join(parts)}</｜DSML｜invoke>'


ARGUMENTS: dict[str, Any] = {"path": 'Kö"ln}', "tags": ["{", "[", "\\"], "options": {"a": {"b": None}}}
AS_TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)
Calls = list[tuple[str, dict[str, Any]]]
# Format, text, its content, its calls.
FAMILIES: list[tuple[str, str, str, Calls]] = [
    ("qwen3_coder", f"So.\n\n{LONG}", "So.", [("write", {"path": "a b.py", "text": CODE, "count": 3})]),
    (
        "qwen3_coder",
        f"{LONG}\n<tool_call>\n{xml('now')}\n</tool_call> Well.",
        " Well.",
        [("write", {"path": "a b.py", "text": CODE, "count": 3}), ("now", {})],
    ),
    ("qwen3_coder", f"Hm {xml('write', path='x')}\n</tool_call>", "Hm", [("write", {"path": "x"})]),
    (
        "qwen3_coder",
        "<tool_call><function=write><parameter=path>a</parameter><parameter=count> 5 </parameter></function>",
        "",
        [("write", {"path": "a", "count": 5})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=write>\n<parameter=path>\na\n<parameter=count>\n5\n</function>\n</tool_call>",
        "",
        [("write", {"path": "a", "count": 5})],
    ),
    (
        "qwen3_coder",
        f'<tool_call>\n{{"name": "write", "arguments": {AS_TEXT}}}\n</tool_call>',
        "",
        [("write", ARGUMENTS)],
    ),
    ("qwen3_coder", f"<tool_call>{xml('write', text='<parameter=x> y')}", "", [("write", {"text": "<parameter=x> y"})]),
    (
        "qwen3_coder",
        "<tool_call><function=write><parameter=options>{'a': 1</parameter></function></tool_call>",
        "",
        [("write", {"options": "{'a': 1"})],
    ),
    ("mistral_args", f"[TOOL_CALLS]write[ARGS]{AS_TEXT}", "", [("write", ARGUMENTS)]),
    (
        "mistral_args",
        f"So. [TOOL_CALLS]write[CALL_ID]aB3dE6gH9[ARGS]{AS_TEXT}[TOOL_CALLS]now[ARGS]{{}}",
        "So.",
        [("write", ARGUMENTS), ("now", {})],
    ),
    ("mistral_args", f"write{AS_TEXT}now{{}}\n", "", [("write", ARGUMENTS), ("now", {})]),
    ("mistral_args", 'writeaB3dE6gH9{"a": 1}', "", [("write", {"a": 1})]),
    ("mistral_args", 'write.twice-a{"a": 1} Well.', " Well.", [("write.twice-a", {"a": 1})]),
    ("mistral_args", f'[TOOL_CALLS] [{{"name": "write", "arguments": {AS_TEXT}}}]', "", [("write", ARGUMENTS)]),
    ("mistral", "[TOOL_CALLS]now[ARGS]{}", "", [("now", {})]),
    (
        "pythonic",
        "[write(path='a\\'b', text=\"é\\u00e9\\n\", ratio=-1.5e3, force=True), now()]",
        "",
        [("write", {"path": "a'b", "text": "éé\n", "ratio": -1.5e3, "force": True}), ("now", {})],
    ),
    (
        "pythonic",
        "[write(tags=['x', \"y\",], options={'a': None})]",
        "",
        [("write", {"tags": ["x", "y"], "options": {"a": None}})],
    ),
    ("pythonic", "<|python_start|>[ now( ) ]<|python_end|> ", "", [("now", {})]),
    ("pythonic", "[write(path=[[], {}], text = null)] Well.", " Well.", [("write", {"path": [[], {}], "text": None})]),
    ("deepseek_v31", f"So.<｜tool▁calls▁begin｜>{V31.format('write', AS_TEXT)}", "So.", [("write", ARGUMENTS)]),
    (
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜>{V31.format('write', AS_TEXT)}{V31.format('now', '{}')}<｜tool▁calls▁end｜>\n",
        "",
        [("write", ARGUMENTS), ("now", {})],
    ),
    ("deepseek_v31", f"{V31.format('now', '{ }')}", "", [("now", {})]),
    (
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜>{V3.format('write', AS_TEXT)}\n{V3.format('now', '{}')}<｜tool▁calls▁end｜>",
        "",
        [("write", ARGUMENTS), ("now", {})],
    ),
    ("glm45", f"So.\n{glm('write', path=CODE, count='3')}", "So.", [("write", {"path": CODE, "count": 3})]),
    (
        "glm45",
        f"{glm('write.twice-a', text=' a ', tags='[1, 2]')}\n{glm('now')}\n Well.",
        "\n Well.",
        [("write.twice-a", {"text": " a ", "tags": [1, 2]}), ("now", {})],
    ),
    ("glm45", glm("write", "", path="</arg_value> a <arg_key>"), "", [("write", {"path": "</arg_value> a <arg_key>"})]),
    ("glm45", f'<tool_call>{{"name": "write", "arguments": {AS_TEXT}}}\n</tool_call>', "", [("write", ARGUMENTS)]),
    ("glm47", f"So.{glm('write', '', path='a', force='true')}", "So.", [("write", {"path": "a", "force": True})]),
    ("glm47", f"{glm('now', '')}{glm('now', '')}", "", [("now", {}), ("now", {})]),
    (
        "glm47",
        f"{glm('write', path='', options=json.dumps({'a': '</arg_value></tool_call>'}))}",
        "",
        [("write", {"path": "", "options": {"a": "</arg_value></tool_call>"}})],
    ),
    (
        "deepseek_v32",
        f"So.\n\n{DSML_CALLS.format(dsml('write', path=(True, CODE), count=(False, '3')))}",
        "So.",
        [("write", {"path": CODE, "count": 3})],
    ),
    (
        "deepseek_v32",
        DSML_CALLS.format(f"{dsml('write', anything=(False, '[5]'), count=(True, '5'))}\n{dsml('now')}"),
        "",
        [("write", {"anything": [5], "count": "5"}), ("now", {})],
    ),
    ("deepseek_v32", f"Hm {dsml('write', unknown=(False, AS_TEXT))}", "Hm", [("write", {"unknown": ARGUMENTS})]),
    (
        "deepseek_v4",
        '<｜DSML｜tool_calls><｜DSML｜invoke  name="now"></｜DSML｜invoke></｜DSML｜tool_calls> Well.',
        " Well.",
        [("now", {})],
    ),
    ("kimi_k2", f"So.{KIMI_SECTION.format(KIMI.format('functions.write:0', AS_TEXT))}", "So.", [("write", ARGUMENTS)]),
    (
        "kimi_k2",
        KIMI_SECTION.format(KIMI.format("functions.write.twice-a:11", "{}") + KIMI.format("now:12 ", ' {"a": 1} ')),
        "",
        [("write.twice-a", {}), ("now", {"a": 1})],
    ),
    ("kimi_k2", f"Hm {KIMI.format('functions.now:0', '{}')} Well.", "Hm Well.", [("now", {})]),
]
# Texts in which nothing is called.
UNCALLED = [
    ("qwen3_coder", "a <function=other> b </function>"),
    ("qwen3_coder", "<tool_call>\n<function=other>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=write>\nHm.\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>"),
    ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=>\na\n</parameter>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<functio"),
    ("mistral_args", "writer{}"),
    ("mistral_args", "write {}"),
    ("mistral_args", "So. write{}"),
    ("mistral_args", "[TOOL_CALLS]other[ARGS]{}"),
    ("mistral_args", "[TOOL_CALLS]write[ARGS]{'a': 1}"),
    ("mistral_args", "write"),
    ("pythonic", "write(path='a')"),
    ("pythonic", "[write(path='a'"),
    ("pythonic", "[write('a')]"),
    ("pythonic", "[write(path=a)]"),
    ("pythonic", "[write(path='a\nb')]"),
    ("pythonic", "[write(path='\\U00110000')]"),
    ("pythonic", "[other()]"),
    ("pythonic", "[link](now)"),
    ("pythonic", "[1, 2]"),
    ("deepseek_v31", f"<｜tool▁calls▁begin｜>{V31.format('other', '{}')}"),
    ("deepseek_v31", f"<｜tool▁calls▁begin｜>{V3.format('write', '{}')}"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>write\n```py\n{}"),
    ("glm45", glm("other", path="a")),
    ("glm45", glm("writer")),
    ("glm45", "<tool_call>write"),
    ("glm45", "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a</tool_call>"),
    ("glm45", "<tool_call>write\n<arg_key></arg_key>\n<arg_value>a</arg_value>\n</tool_call>"),
    ("glm47", "<tool_call>write<arg_key>path</arg_key>a</tool_call>"),
    ("glm47", "<tool_call>write\nHm.\n</tool_call>"),
    ("deepseek_v32", DSML_CALLS.format(dsml("other"))),
    ("deepseek_v32", dsml("write", path=(True, "a")).removesuffix("</｜DSML｜invoke>")),
    (
        "deepseek_v32",
        '<｜DSML｜invoke name="write"><｜DSML｜parameter name="path">a</｜DSML｜parameter></｜DSML｜invoke>',
    ),
    ("deepseek_v4", "a <｜DSML｜tool_call"),
    ("kimi_k2", KIMI_SECTION.format(KIMI.format("functions.other:0", "{}"))),
    ("kimi_k2", KIMI_SECTION.format(KIMI.format("functions.write:x", "{}"))),
    ("kimi_k2", KIMI_SECTION.format(KIMI.format("functions.write:1234567890", "{}"))),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0{}"),
]


def parser_of(form: str) -> OutputParser:
    return OutputParser(FORMATS[form], WRITERS, None)


def read(form: str, *pieces: str) -> tuple[str, Calls]:
    found = gathered(events_of(form, list(pieces), None, WRITERS))
    return found.content, [(call.name, json.loads(call.arguments)) for call in found.calls]


@pytest.mark.parametrize(("form", "text", "content", "calls"), FAMILIES)
def test_whole_calls_at_every_boundary(form: str, text: str, content: str, calls: Calls) -> None:
    assert read(form, text) == (content, calls)
    assert read(form, *text) == (content, calls)
    whole = merged_events(events_of(form, [text], None, WRITERS))
    for cut in range(1, len(text)):
        assert merged_events(events_of(form, [text[:cut], text[cut:]], None, WRITERS)) == whole


@pytest.mark.parametrize(("form", "text", "content", "calls"), FAMILIES)
def test_a_text_that_stops_in_a_call_has_those_before_it(form: str, text: str, content: str, calls: Calls) -> None:
    for cut in range(len(text)):
        _, found = read(form, text[:cut])
        assert found == calls[: len(found)]


@pytest.mark.parametrize(("form", "text"), UNCALLED)
def test_what_is_no_call_of_a_family_is_text(form: str, text: str) -> None:
    assert read(form, text) == read(form, *text) == (text, [])


def test_text_arguments_are_told_while_they_come() -> None:
    parser = parser_of("qwen3_coder")
    assert parser.feed("<tool_call>\n<function=write") == []
    assert parser.feed(">\n<parameter=text>\n") == [CallBegun(0, "write"), CallDelta(0, '{"text": ')]  # of two types
    assert parser.feed("a") == []
    assert parser.feed("\n</parameter>\n<parameter=path>\nb") == [CallDelta(0, '"a", "path": "b')]
    assert parser.feed('"c\n') == [CallDelta(0, '\\"c')]
    assert parser.feed("d\n</param") == [CallDelta(0, "\\nd")]
    parser = parser_of("glm45")
    assert parser.feed("<tool_call>write") == []
    assert parser.feed("\n<arg_key>path</arg_key>\n<arg_value>\na") == [
        CallBegun(0, "write"),
        CallDelta(0, '{"path": "\\na'),
    ]
    parser = parser_of("deepseek_v32")
    assert parser.feed('<｜DSML｜invoke name="write">\n') == [CallBegun(0, "write")]
    assert parser.feed('<｜DSML｜parameter name="text" string="true">a') == [CallDelta(0, '{"text": "a')]
    parser = parser_of("pythonic")
    assert parser.feed("[write(") == [CallBegun(0, "write")]
    assert parser.feed("path='b") == [CallDelta(0, '{"path": "b')]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("path", "null", "null"),
        ("path", " 5 ", " 5 "),
        ("path", "", ""),
        ("path", "\n\na\n", "\n\na\n"),
        ("text", "None", None),
        ("text", "5", "5"),
        ("count", "-5", -5),
        ("count", "5.5", "5.5"),
        ("count", "many", "many"),
        ("count", "null", None),
        ("ratio", "1e3", 1e3),
        ("ratio", "7", 7),
        ("ratio", "null", None),
        ("force", "True", True),
        ("force", "yes", "yes"),
        ("tags", '["a", "</parameter></function>"]', ["a", "</parameter></function>"]),
        ("tags", "['a', True]", ["a", True]),
        ("tags", "{}", "{}"),
        ("tags", "a, b", "a, b"),
        ("options", '{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ("options", "{'a': 1,}", {"a": 1}),
        ("options", '{"a": 1', '{"a": 1'),
        ("mode", "read", "read"),
        ("either", "5", 5),
        ("either", "five", "five"),
        ("anything", "5", "5"),
        ("unknown", "[1]", "[1]"),
    ],
)
def test_values_have_the_type_of_their_schema(key: str, text: str, value: object) -> None:
    for form, call in {
        "qwen3_coder": f"<tool_call>\n{xml('write', **{key: text})}\n</tool_call>",
        "glm45": glm("write", **{key: text}),
        "glm47": glm("write", "", **{key: text}),
    }.items():
        assert read(form, call) == read(form, *call) == ("", [("write", {key: value})])


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("path", "5", "5"),
        ("path", '"a </｜DSML｜parameter></｜DSML｜invoke>"', "a </｜DSML｜parameter></｜DSML｜invoke>"),
        ("path", "a", "a"),
        ("text", "null", None),
        ("count", "-5", -5),
        ("force", "true", True),
        ("either", '"5"', "5"),
        ("either", "5", 5),
        ("anything", "5", 5),
        ("anything", '["a"]', ["a"]),
        ("unknown", "null", None),
        ("unknown", "{", "{"),
    ],
)
def test_values_that_say_they_are_json(key: str, text: str, value: object) -> None:
    call = dsml("write", **{key: (False, text)})
    assert read("deepseek_v32", call) == read("deepseek_v32", *call) == ("", [("write", {key: value})])


def test_types_of_schemas_that_are_odd() -> None:
    loop: dict[str, Any] = {
        "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}, "b": {"$ref": "#/$defs/b"}}
    }
    assert SchemaTypes(loop).of({"$ref": "#/$defs/a"}) == {"null"}
    for schema in (*({"$ref": name} for name in ("#/$defs/b", "#/nowhere", "other.json", 5)), True, None, 5, {}):
        assert SchemaTypes(loop).of(schema) == {"string"}
    wide: dict[str, Any] = {"$defs": {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(60)}}
    assert SchemaTypes(wide).of({"$ref": "#/$defs/0"}) == {"string"}
    assert SchemaTypes({}).of({"type": ["integer", 5]}) == {"integer"}
    assert SchemaTypes({}).of({"const": True}) == {"boolean"}
    assert SchemaTypes({}).of({"properties": {}}) == {"object"}


def as_json(text: str) -> str:
    value = SpacedValue()
    for char in text:
        value.take(char)
    return value.as_json()


def test_values_as_python_writes_them() -> None:
    for text, value in {
        "'a'": "a",
        '"\\x41\\u00e9\\U0001F642\\d\\/"': "Aé🙂\\d/",
        "[1, 2.5, -3,]": [1, 2.5, -3],
        "{'a': {\"b\": [None, True, False, null, true, false]}}": {"a": {"b": [None, True, False, None, True, False]}},
        " [ ] ": [],
    }.items():
        assert json.loads(as_json(text)) == value
    unended, wrong = ("", "'a", "[1", "\\"), ("a", "[1}", "{1: 2}", "{'a'}", "[,]", "1 2", "01", "'a' 'b'")
    for text in (*unended, *wrong, "[" * 101, "1" * 401):
        assert as_json(text) == ""
    assert typed("\ud800", frozenset(["string"]), "") == '"\\ud800"'


ALPHABET = st.characters(codec="utf-8")
ARGUMENT_TEXTS = st.dictionaries(st.text(ALPHABET, max_size=6), st.text(ALPHABET, max_size=12), max_size=3)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.lists(ARGUMENT_TEXTS, min_size=1, max_size=3))
def test_what_is_written_is_read(form: str, asked: list[dict[str, str]]) -> None:
    """Also where the family's own way does not bear the keys or values."""
    functions = [ToolFunction("f.g-1", {"type": "object"})]
    text = FORMATS[form].written([("f.g-1", arguments) for arguments in asked])
    found = gathered(events_of(form, [text], None, functions))
    assert found.content == ""
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [("f.g-1", each) for each in asked]


def test_what_is_held_back_is_bounded() -> None:
    parser = parser_of("qwen3_coder")
    parser.feed("<tool_call>\n<function=write>\n<parameter=path>\n")
    for text in ("\n" * 2000, "</parameter>" + "\n" * 2000, "\n<parameter=" + "a" * 2000, "\n<parameter=path>" * 100):
        told_now = "".join(event.arguments for event in parser.feed(text) if isinstance(event, CallDelta))
        assert len(json.loads(f'"{told_now}"')) >= len(text) - 600


# ----------------------------------------------------------------------------------------------------------------------
# Grammars.

STRICT: dict[str, dict[str, Any]] = {
    "texts": {
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 6},
            "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}], "title": "Note"},
            "kind": {"enum": ["a", "a b", "b\n"]},
            "also": {"type": ["string", "null"], "enum": ["x", None]},
        },
        "required": ["name", "kind"],
    },
    "values": {
        "properties": {
            "n": {"type": "integer", "minimum": 0, "maximum": 99},
            "default": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 9}]},
            "on": {"type": "boolean"},
            "places": {"type": "array", "items": {"$ref": "#/$defs/Place"}, "minItems": 1, "maxItems": 2},
        },
        "required": ["places"],
        "$defs": {
            "Place": {
                "type": "object",
                "properties": {"c": {"enum": ["</parameter>", '"']}},
                "required": ["c"],
                "additionalProperties": False,
            }
        },
    },
    "optional": {"properties": {"a": {"type": "boolean"}, "b": {"enum": ["x"]}, "c": {"type": "null"}}},
    "nothing": {"properties": {}},
    "as JSON": {  # a reader of untyped values could take 5 for another one; a pattern is more than characters
        "properties": {"id": {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^[a-c]{2}$"}]}},
        "required": ["id"],
    },
    "odd keys": {"properties": {"a b>": {"type": "boolean"}}, "required": ["a b>"]},
}
CLOSED = {"type": "object", "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}


def written_at_random(grammar: str, draw: random.Random) -> str:
    """What a model writes that has no opinion."""
    tokenizer, matching, ids = byte_level(), begun(grammar), list[int]()
    while True:
        (mask,) = matching.masks([])
        assert mask is not None
        allowed = mask.nonzero()[0].tolist()
        assert allowed, tokenizer.decode(ids)
        assert len(ids) < 4000
        token = draw.choice(allowed)
        assert matching.take([token]) == 1
        if token == 0:
            return str(tokenizer.decode(ids, skip_special_tokens=False))
        ids.append(token)


@pytest.mark.parametrize("form", sorted(FORMATS))
@pytest.mark.parametrize("name", STRICT)
def test_what_a_grammar_lets_through_is_read_and_meets_its_schema(form: str, name: str) -> None:
    schema = {**CLOSED, **STRICT[name]}
    functions = [ToolFunction("f", schema, strict=True), ToolFunction("g", {**CLOSED, "properties": {}}, strict=True)]
    draw = random.Random(f"{form} {name}")
    grammar = call_grammar(FORMATS[form], functions, forced=True, several=True)
    for _ in range(4):
        text = written_at_random(grammar, draw)
        found = gathered(events_of(form, [text], None, functions))
        assert found.content == "", text
        assert found.calls, text
        for call in found.calls:
            if call.name == "f":
                jsonschema.validate(json.loads(call.arguments), schema)
            else:
                assert (call.name, json.loads(call.arguments)) == ("g", {})


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_open_arguments(form: str) -> None:
    """A schema that allows any arguments gets some."""
    functions = [ToolFunction("f", {"type": "object"})]
    grammar = call_grammar(FORMATS[form], functions, forced=True, several=False)
    for arguments in ({}, {"a": "x\ny"}, {"a": "1", "b_2": "é"}):
        assert takes(begun(grammar), held(form, ("f", arguments)))
