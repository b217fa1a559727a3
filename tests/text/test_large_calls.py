"""Large texts and schemas of calls: what is walked grows as they do, and no faster, in every format."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from specwire.text.tool_calls.formats import FORMATS, THOUGHT
from specwire.text.tool_calls.grammar import MOST_REPEATED, call_grammar
from specwire.text.tool_calls.parser import OutputParser, gathered
from specwire.text.tool_calls.readers import MOST_HELD, ToolFunction

SIZE, TIMES = 60, 8
# A call of Python's for each of them.
Texts = Callable[[int], tuple[list[ToolFunction], str]]


@contextmanager
def counted() -> Iterator[list[int]]:
    """Calls of functions, ours and the interpreter's."""
    calls = [0]

    def count(frame: FrameType, event: str, arg: object) -> None:
        calls[0] += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def deep(size: int) -> dict[str, Any]:
    """Arguments that all refer to definitions of which each leads to the next one."""
    chain: dict[str, Any] = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"type": "null"}]} for n in range(size)}
    chain[f"d{size}"] = {"type": "integer"}
    properties = {f"a{n}": {"anyOf": [{"$ref": "#/$defs/d0"}, {"const": n}]} for n in range(size)}
    return {"type": "object", "properties": properties, "$defs": chain}


def many_arguments(form: str) -> Texts:
    def made(size: int) -> tuple[list[ToolFunction], str]:
        return [ToolFunction("write", deep(size))], FORMATS[form].written(
            [("write", {f"a{n}": n for n in range(size)})]
        )

    return made


def tags_in_strings(form: str) -> Texts:
    """A list whose strings have the tags that end a value."""

    def made(size: int) -> tuple[list[ToolFunction], str]:
        schema = {"properties": {"a": {"type": "array"}}}
        whole = FORMATS[form].written([("write", {"a": ["MARK"]})])
        end = whole[whole.index("MARK") + len('MARK"]') :].lstrip("\n")
        return [ToolFunction("write", schema)], whole.replace("MARK", f" {end}" * size)

    return made


def many_heads(form: str) -> Texts:
    """Beginnings of calls of which none goes on, of many functions."""

    def made(size: int) -> tuple[list[ToolFunction], str]:
        functions = [ToolFunction(f"a_function_with_a_name_of_some_length_{n}", {}) for n in range(size)]
        whole = FORMATS[form].written([(functions[0].name, {})])
        return functions, (whole[: whole.index("length_") + 3] + "!") * size

    return made


def white_space(form: str, behind: str) -> Texts:
    """Behind a part of a call, more than anything needs."""

    def made(size: int) -> tuple[list[ToolFunction], str]:
        whole = FORMATS[form].written([("write", {"a": "text"})])
        at = whole.find(behind) + len(behind) if behind else 0
        return [ToolFunction("write", {})], whole[:at] + " " * (20 * size) + whole[at:]

    return made


def alternating(form: str) -> Texts:
    return lambda size: ([ToolFunction("write", {})], (FORMATS[form].written([("write", {})]) + " text ") * size)


CASES: dict[str, tuple[str, Texts]] = {
    f"{name} {form}": (form, make(form))
    for form in FORMATS
    for name, make in (
        ("arguments", many_arguments),
        ("heads", many_heads),
        ("alternating", alternating),
        ("space first", lambda form: white_space(form, "")),
        ("space before a name", lambda form: white_space(form, FORMATS[form].start or FORMATS[form].opener or "[")),
        ("space in a tag", lambda form: white_space(form, "invoke" if form.startswith("deepseek_v") else "write")),
        ("space at the end", lambda form: white_space(form, "text")),
    )
} | {f"tags {form}": (form, tags_in_strings(form)) for form in ("qwen3_coder", "glm45", "glm47", "deepseek_v32")}


@pytest.mark.parametrize("thinking", [None, True], ids=["", "thinking"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_walked_grows_with_the_text(case: str, thinking: bool | None) -> None:
    form, make = CASES[case]
    taken = []
    for size in (SIZE, TIMES * SIZE):
        functions, text = make(size)
        parser = OutputParser(FORMATS[form], functions, thinking)
        with counted() as calls:
            parser.feed((" \n" * size + THOUGHT if thinking else "") + text)
            told = parser.finish()
        assert gathered(told) is not None
        taken.append(calls[0])
    assert taken[1] < 1.5 * TIMES * taken[0]


@pytest.mark.parametrize("thinking", [None, True], ids=["", "thinking"])
@pytest.mark.parametrize("form", FORMATS)
def test_no_text_is_put_together_character_by_character(form: str, thinking: bool | None) -> None:
    """Each longer text would be a copy of all of it."""
    for head in (FORMATS[form].written([("write", {"a": ["x"]})]), FORMATS[form].opener, ""):
        for cut in range(0, len(head) + 1, 3):
            parser = OutputParser(FORMATS[form], [ToolFunction("write", {})], thinking)
            parser.feed(head[:cut] + "\n" + " " * (4 * MOST_HELD))
            assert longest(parser) <= MOST_HELD + len(head), repr(head[:cut])


def longest(held: object, seen: frozenset[int] = frozenset()) -> int:
    """Of the texts that an object of ours and those within it keep by themselves."""
    if id(held) in seen or not type(held).__module__.startswith("specwire") or isinstance(held, dict):
        return 0
    slots = [each for kind in type(held).__mro__ for each in getattr(kind, "__slots__", ())]
    values = [*getattr(held, "__dict__", {}).values(), *(getattr(held, each) for each in slots if hasattr(held, each))]
    texts = [len(each) for each in values if isinstance(each, str)]
    return max([0, *texts, *(longest(each, seen | {id(held)}) for each in values)])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("kind", ["numbers", "choices", "guidance"])
def test_a_grammar_repeats_little_of_a_schema(form: str, distinct: bool, kind: str) -> None:
    """Definitions of 40 KiB that 300 arguments refer to."""
    told: dict[str, Any] = {"type": "integer", "enum": list(range(8000))}
    if kind == "choices":
        told = {"enum": [f"choice {n}" for n in range(3000)]}
    members = {
        f"a{n}": {
            "description": f"the {n}th",
            **({"anyOf": [{"$ref": "#/$defs/t"}, {"const": n}]} if distinct else {"$ref": "#/$defs/t"}),
        }
        for n in range(300)
    }
    schema = {"type": "object", "properties": members, "$defs": {"t": told}}
    if kind == "guidance":
        schema["x-guidance"] = {"lenient": False, "note": "x" * 40_000}
    grammar = call_grammar(FORMATS[form], [ToolFunction("write", schema, strict=True)], True, True)
    assert len(grammar) < 4 * len(json.dumps(schema)) + MOST_REPEATED
