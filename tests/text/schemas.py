"""Constraints at random, and what shows that a text fits one, by other means than the library that enforces it."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
from hypothesis import strategies as st

from specwire.core.law.constraint import Constraint, ConstraintKind

Schemas = st.SearchStrategy[dict[str, Any]]

# Short ones, so that a model that draws at random comes to their end.
_plain: Schemas = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-99, 99),
        st.integers(0, 500),
    ),
    st.builds(
        lambda low, span: {"type": "string", "minLength": low, "maxLength": low + span},
        st.integers(0, 2),
        st.integers(0, 5),
    ),
    st.sampled_from([{"type": "string", "pattern": "^[a-f]{2,4}$"}, {"type": "string", "format": "date"}]),
    st.lists(st.sampled_from(["red", 'gr"een', "é\n", 7, 1.5, None, True]), min_size=1, max_size=3, unique_by=repr).map(
        lambda values: {"enum": values}
    ),
    st.just({"const": {"a": [1, "b"]}}),
)
_names = ("name", "age", "é", "a b", 'x"y')


def _object(properties: dict[str, dict[str, Any]], left_out: int) -> dict[str, Any]:
    required = sorted(properties)[left_out:]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


schemas: Schemas = st.recursive(
    _plain,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(st.sampled_from(_names), inner, min_size=1, max_size=3), st.integers(0, 1)),
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 2)),
        st.lists(inner, min_size=2, max_size=2).map(lambda several: {"anyOf": several}),
    ),
    max_leaves=4,
)
# Such as Python's own module reads in the same way.
regexes = st.lists(
    st.sampled_from(
        [r"[a-c]{1,3}", r"(foo|bar|é+)", r"\d{2}-\d{2}", r"x?y*z", r"\(.{0,4}\)", r"[^a-z]{2}", r"(ab){2,}c"]
    ),
    min_size=1,
    max_size=3,
).map("".join)
choices = st.lists(
    st.one_of(
        st.sampled_from(["yes", "no", "yes and no", '"q"', "a\nb", "日本"]),
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=4,
)
grammars = st.sampled_from(['start: item ("," item){0,3}\nitem: /[a-z]{1,3}/ | "(" start ")"\n'])

constraints = st.one_of(
    schemas.map(lambda schema: Constraint(ConstraintKind.JSON_SCHEMA, (json.dumps(schema),))),
    regexes.map(lambda regex: Constraint(ConstraintKind.REGEX, (regex,))),
    choices.map(lambda texts: Constraint(ConstraintKind.CHOICES, tuple(texts))),
    grammars.map(lambda grammar: Constraint(ConstraintKind.GRAMMAR, (grammar,))),
)


def fits(constraint: Constraint, text: str) -> bool:
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return _fits_schema(json.loads(constraint.text), text)
        case ConstraintKind.REGEX:
            return re.fullmatch(constraint.text, text) is not None
        case ConstraintKind.CHOICES:
            return text in constraint.texts
        case ConstraintKind.GRAMMAR:
            return _is_list(text)


def _fits_schema(schema: dict[str, Any], text: str) -> bool:
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    try:
        return bool(checker.is_valid(json.loads(text)))
    except ValueError:
        return False


def _is_list(text: str) -> bool:
    """Of the only grammar that there is: innermost brackets are items, until none are left."""
    item = "[a-z]{1,3}"
    inner = re.compile(rf"\({item}(,{item}){{0,3}}\)")
    while inner.search(text):
        text = inner.sub("a", text)
    return re.fullmatch(rf"{item}(,{item}){{0,3}}", text) is not None
