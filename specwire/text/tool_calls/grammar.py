"""The texts that are, or may have, calls of given functions: a grammar as llguidance reads Lark.

Arguments meet their schema however a family writes them. Where each stands in tags, each has a rule of its own, if the
schema can be told so; else the call is written as JSON, which every family's reader reads, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specwire.text.tool_calls.formats import JsonStyle, NamedStyle, ToolFormat, XmlStyle
from specwire.text.tool_calls.readers import NamedCall, ToolFunction, XmlTags
from specwire.text.tool_calls.values import SchemaTypes, branches_of

Json = Mapping[str, Any]

# Calls of one answer where the grammar demands some: a poor model would never come to an end.
MOST_CALLS = 16
WHITESPACE = r"[ \n\r\t]{0,32}"
ANY_OBJECT: Json = {"type": "object"}


def call_grammar(
    form: ToolFormat, functions: Sequence[ToolFunction], forced: bool, several: bool, thought: bool = False
) -> str:
    """forced: the text is one call or, with `several`, up to `MOST_CALLS`, and each meets its function's schema.

    Otherwise it is any text that the format does not take for a call, or has calls; those of strict functions meet
    their schema, the others' arguments are an object. thought: it stands behind one (`Constraint.behind`).
    """
    lines = [
        f"start: {'calls' if forced else _free(form, several)}",
        f"calls: {_line(_literal(form.before), _calls(form, several), _literal(form.behind))}",
        *_free_rules(form, functions, several, thought),
        f"call: {' | '.join(f'call_{index}' for index in range(len(functions)))}",
    ]
    shared = _Shared()
    for index, function in enumerate(functions):
        schema = function.parameters if forced or function.strict else ANY_OBJECT
        lines += _call_rules(form, str(index), function.name, schema, shared)
    return "\n".join([*lines, *shared.lines, ""])


def _literal(text: str) -> str:
    """A text that stands in a rule; nothing for none."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _line(*parts: str) -> str:
    return " ".join(part for part in parts if part) or '""'


def _json(schema: Json) -> str:
    return f"%json {json.dumps(schema)}"


# ----------------------------------------------------------------------------------------------------------------------
# Around the calls.


def _calls(form: ToolFormat, several: bool) -> str:
    more = f" ({_line(_literal(form.between), 'call')}){{0,{MOST_CALLS - 1}}}" if several else ""
    return f"call{more}"


def _leads(form: ToolFormat) -> bool:
    return bool(form.leads) or form.named


def _free(form: ToolFormat, several: bool) -> str:
    if _leads(form):
        return "PLAIN | calls"
    return "tagged* REST" if several else "REST | tagged"


def _free_rules(form: ToolFormat, functions: Sequence[ToolFunction], several: bool, thought: bool) -> list[str]:
    """Rules for texts that may have calls; as of any Lark grammar, one that is not used does no harm."""
    if _leads(form):
        openers = "".join(re.escape(char) for char in form.leads)
        # Where a name may follow the gap, white space is the gap's: it must not make a text of the name.
        space = "" if form.named and thought else r"[ \n\r\t]*"
        parts = [rf"/({space}[^ \n\r\t{openers}](.|\n)*)?/"]
        if form.opener:
            parts.append(f"~/{_anywhere(form.opener)}/")
        if form.named:
            names = "|".join(re.escape(each.name) for each in functions)
            parts.append(rf"~/[ \n\r\t]*({names})[a-zA-Z0-9_\[\]]{{0,24}}\{{(.|\n)*/")
        return [f"PLAIN: {' & '.join(parts)}"]
    inside = several and form.opener not in form.between
    rest = form.before.removeprefix(form.opener)
    return [
        rf"REST: /(.|\n)*/{f' & ~/{_anywhere(form.start)}/' if form.start else ''}",
        f"opened[lazy]: REST {_literal(form.opener)}",
        f"tagged: {_line('opened', _literal(rest), _calls(form, inside), _literal(form.behind))}",
    ]


def _anywhere(*texts: str) -> str:
    """An expression for texts that have one of these."""
    found = "|".join(map(re.escape, texts)).replace("/", r"\/")
    return rf"(.|\n)*({found})(.|\n)*"


# ----------------------------------------------------------------------------------------------------------------------
# One call.


class _Shared:
    """What arguments of all functions have alike, as rules that are written once.

    left: bytes that may still be written more than once, because a schema is whole by itself: with all that it may
    refer to.
    """

    def __init__(self) -> None:
        self.left = MOST_REPEATED
        self._names: dict[str, str] = {}

    def rule(self, body: str) -> str:
        """The name of the rule with this body."""
        return self._names.setdefault(body, f"shared_{len(self._names)}")

    @property
    def lines(self) -> list[str]:
        return [f"{name}: {body}" for body, name in self._names.items()]


def _call_rules(form: ToolFormat, index: str, name: str, schema: Json, shared: _Shared) -> Iterator[str]:
    """The rule call_INDEX, and those that it needs."""
    match form.style:
        case (JsonStyle() | NamedStyle()) as style:
            yield from _object_rules(style, index, name, schema)
        case XmlStyle() as style if (rules := _xml_rules(style.tags, index, name, schema, shared)) is not None:
            yield from rules
        case XmlStyle() as style:
            yield from _object_rules(style.as_json, index, name, schema)
        case _:
            yield from _object_rules(JsonStyle(), index, name, schema)


def _object_rules(style: JsonStyle | NamedStyle, index: str, name: str, schema: Json) -> Iterator[str]:
    yield f"call_{index}: {_line(_head(style, name), f'arguments_{index}', _literal(style.tail))}"
    yield f"arguments_{index}: {_json(_spaced({'type': 'object', **schema}))}"


def _head(style: JsonStyle | NamedStyle, name: str) -> str:
    if not isinstance(style, NamedStyle) or not style.numbered:
        return _literal(style.head(name))
    # Calls of one answer have different numbers.
    behind = NamedCall.number.sub("", style.between)
    return f"{_literal(f'{style.befores[0]}{name}:')} /[0-9]{{1,6}}/ {_literal(behind)}"


def _spaced(schema: Json) -> Json:
    """With a bound on white space: without one a model may write nothing else."""
    guidance = {"whitespace_pattern": WHITESPACE}
    return {**schema, "x-guidance": {**guidance, **schema.get("x-guidance", {})}}


@dataclass(frozen=True, slots=True)
class _Member:
    """An argument that a schema declares. rule: its value as JSON, by a schema with all that it may refer to."""

    key: str
    schema: Json
    rule: str
    required: bool


# Bytes of definitions, and of what they are told beside, that the arguments of one answer's calls may repeat.
MOST_REPEATED = 1 << 16
# What the schema of an object may say besides, so that its members may be told one by one.
OF_DEFINITIONS = ("$defs", "definitions")
OF_NOTES = ("title", "description", "default", "examples", "$comment")
BESIDE = frozenset(
    ("type", "properties", "required", "additionalProperties", "x-guidance", "$schema", *OF_DEFINITIONS, *OF_NOTES)
)
# What a reference may lead to, so that it holds beside the other members, too.
REFERENCE = re.compile(r'"\$ref": "(?!#/(\$defs|definitions)/)')


def _members(schema: Json, shared: _Shared) -> list[_Member] | None:
    """The arguments that the schema declares, the required ones first; None where it cannot be told by them.

    Nor can one whose definitions would be repeated too often. That is known before any of it is written.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if set(schema) - BESIDE or not isinstance(properties, dict) or not isinstance(required, list):
        return None
    if not all(XmlStyle.keys.fullmatch(key) and isinstance(each, dict) for key, each in properties.items()):
        return None
    if not all(isinstance(name, str) and name in properties for name in required):
        return None
    if REFERENCE.search(json.dumps(schema)):
        return None
    guidance = {"x-guidance": schema.get("x-guidance", {})}
    definitions = {name: schema[name] for name in OF_DEFINITIONS if name in schema}
    own = {key: {name: one for name, one in each.items() if name not in OF_NOTES} for key, each in properties.items()}
    texts = {key: json.dumps(each) for key, each in own.items()}
    refer = ['"$ref"' in text for text in set(texts.values())]
    repeated = len(refer) * len(json.dumps(guidance)) + sum(refer) * len(json.dumps(definitions))
    if repeated > shared.left:
        return None
    shared.left -= repeated
    rules: dict[str, str] = {}
    for key, text in texts.items():
        if text not in rules:
            beside = {**guidance, **definitions} if '"$ref"' in text else guidance
            rules[text] = shared.rule(_json(_spaced({**own[key], **beside})))
    needed = frozenset(required)
    found = [_Member(key, each, rules[texts[key]], key in needed) for key, each in properties.items()]
    return sorted(found, key=lambda member: not member.required)


def _xml_rules(tags: XmlTags, index: str, name: str, schema: Json, shared: _Shared) -> list[str] | None:
    members = _members(schema, shared)
    if members is None:
        return None
    head, tail = _literal(f"{tags.function}{name}{tags.named}"), _literal(tags.end)
    if "properties" not in schema and schema.get("additionalProperties", True) is True:  # any arguments will do
        argument = f"{_literal(tags.key)} KEY_{index} value_{index}"
        key = f"KEY_{index}: /{XmlStyle.keys.pattern}/"
        return [f"call_{index}: {_line(head, f'({argument})*', tail)}", key, *_open_value(tags, index)]
    rules, parts = [], []
    values = _XmlValues(tags, SchemaTypes(schema), shared)
    for number, member in enumerate(members):
        place = f"{index}_{number}"
        value = values.member(place, member)
        if value is None:
            return None
        rules += value
        parts.append(f"member_{place}{'' if member.required else '?'}")
    return [f"call_{index}: {_line(head, *parts, tail)}", *rules]


def _open_value(tags: XmlTags, place: str) -> list[str]:
    """The rule value_PLACE, of any value: a text, or JSON where its tag may say so."""
    values = [f"{_literal(tags.text)} text_{place}"]
    rules = _text_rules(tags, place)
    if tags.marked:
        values.append(f"{_literal(tags.json)} json_{place} {_literal(tags.value_end)}")
        rules.append(f"json_{place}: {_json(_spaced({}))}")
    return [f"value_{place}: {' | '.join(values)}", *rules]


# What the schema of a text may say, so that a rule for its characters is all.
OF_TEXTS = frozenset(("type", "minLength", "maxLength", *OF_NOTES))
NULLS = ("null", "none")
# A text may be wrapped in so many choices of one.
MOST_WRAPPED = 8


class _XmlValues:
    """Rules of one function's arguments in their tags. What several refer to is looked at once."""

    def __init__(self, tags: XmlTags, types: SchemaTypes, shared: _Shared) -> None:
        self._tags = tags
        self._types = types
        self._shared = shared
        self._branches: dict[int, Json] = {}
        self._choices: dict[tuple[int, bool], str | None] = {}

    def member(self, place: str, member: _Member) -> list[str] | None:
        """The rule member_PLACE; None where the reader could take the argument's value for another one."""
        tags, before, types = self._tags, self._tags.key + member.key, self._types.of(member.schema)
        found = self._text(place, before, member) if "string" in types and types <= {"string", "null"} else None
        if found is not None or ("string" in types and not tags.marked):
            return found
        return [f"member_{place}: {_literal(before + tags.json)} {member.rule} {_literal(tags.value_end)}"]

    def _text(self, place: str, before: str, member: _Member) -> list[str] | None:
        """The same of a text, or null."""
        tags, text = self._tags, self._branch(member.schema)
        nullable = "null" in self._types.of(member.schema)
        null = _literal(f"{before}{tags.json}null{tags.value_end}")
        choices = [text["const"]] if "const" in text else text.get("enum")
        if isinstance(choices, list):
            rule = self._choice(text, choices, nullable)
            if rule is None:
                return None
            values = [f"{_literal(before + tags.text)} {rule}"] if rule else []
            values += [null] if None in choices else []
            return [f"member_{place}: {' | '.join(values)}"]
        least, most = text.get("minLength", 0), text.get("maxLength", "")
        if set(text) - OF_TEXTS or type(least) is not int or (type(most) is not int and most != ""):
            return None
        # Without a mark the text "null" is one.
        values = [f"{_literal(before + tags.text)} text_{place}", *([null] if nullable and tags.marked else ())]
        return [f"member_{place}: {' | '.join(values)}", *_text_rules(tags, place, least, most)]

    def _choice(self, text: Json, choices: Sequence[object], nullable: bool) -> str | None:
        """The rule for one of these texts and what ends it; "" where none of them is a text, None if one cannot be."""
        known = id(text), nullable
        if known not in self._choices:
            texts = [each for each in choices if isinstance(each, str)]
            ended = " | ".join(_literal(f"{each}{self._tags.value_end}") for each in texts)
            rule = self._shared.rule(ended) if texts else ""
            self._choices[known] = rule if _are_texts(self._tags, choices, nullable) else None
        return self._choices[known]

    def _branch(self, schema: object, left: int = MOST_WRAPPED) -> Json:
        """The schema of the text that a value is; of null and a text, that of the text."""
        found = self._types.resolved(schema)
        if id(found) not in self._branches:
            texts = [each for each in branches_of(found) if self._types.of(each) != {"null"}]
            wraps = len(texts) == 1 and not set(found) - OF_TEXTS - {"anyOf", "oneOf"} and left
            self._branches[id(found)] = self._branch(texts[0], left - 1) if wraps else found
        return self._branches[id(found)]


def _are_texts(tags: XmlTags, choices: Sequence[object], nullable: bool) -> bool:
    """Whether each choice can be written, and is read as what it is."""
    texts = [each for each in choices if isinstance(each, str)]
    if not choices or any(not isinstance(each, str | None) for each in choices) or any(map(tags.marks.search, texts)):
        return False
    return tags.marked or not nullable or not any(each.lower() in NULLS for each in texts)


def _text_rules(tags: XmlTags, place: str, least: int = 0, most: object = "") -> list[str]:
    """The rule text_PLACE: text up to its closing tag. It has no tag within itself."""
    return [
        f"text_{place}[lazy]: TEXT_{place} {_literal(tags.value_end)}",
        rf"TEXT_{place}: /(.|\n){{{least},{most}}}/ & ~/{_anywhere(*tags.forbidden)}/",
    ]
