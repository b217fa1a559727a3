"""What form an answer must have: OpenAI's `response_format`, and the fields that vLLM's clients send."""

from __future__ import annotations

import json
from typing import Any

from orchestrator.http.fields import Fields, shown
from specwire.core.constraint import Constraint, ConstraintKind
from specwire.core.sampling import InvalidParameter

ANY_OBJECT = {"type": "object"}
# By the names in `structured_outputs`; with "guided_" before it, each is also a field of its own.
KINDS = {
    "json": ConstraintKind.JSON_SCHEMA,
    "regex": ConstraintKind.REGEX,
    "choice": ConstraintKind.CHOICES,
    "grammar": ConstraintKind.GRAMMAR,
}


def take_form(fields: Fields) -> Constraint | None:
    """None for any. InvalidParameter names the field."""
    found = [*_response_format(fields), *_structured(fields), *_guided(fields)]
    if len(found) > 1:
        raise InvalidParameter(found[1][0], f"contradicts {found[0][0]}: an answer has one form")
    return found[0][1] if found else None


Named = list[tuple[str, Constraint]]


def _response_format(fields: Fields) -> Named:
    inner = fields.inner("response_format")
    if inner is None:
        return []
    kind = inner.choice("type", ("text", "json_object", "json_schema"))
    if kind is None:
        raise inner.invalid("type", "is required")
    if kind == "json_schema":
        found = _named_schema(inner)
    else:
        found = [("response_format", _schema("response_format", ANY_OBJECT))] if kind == "json_object" else []
    inner.end()
    return found


def _named_schema(inner: Fields) -> Named:
    named = inner.inner("json_schema")
    if named is None:
        raise inner.invalid("json_schema", "is required")
    for name in ("name", "description"):
        named.text(name)
    named.flag("strict")  # it always is
    schema = named.take("schema")
    if schema is None:
        raise named.invalid("schema", "is required")
    named.end()
    return [("response_format", _schema("response_format.json_schema.schema", schema))]


def _structured(fields: Fields) -> Named:
    inner = fields.inner("structured_outputs")
    if inner is None:
        return []
    found = [*_each(inner, "", "structured_outputs."), *_any_object(inner)]
    inner.end()
    return found


def _any_object(inner: Fields) -> Named:
    name = "structured_outputs.json_object"
    return [(name, _schema(name, ANY_OBJECT))] if inner.flag("json_object") else []


def _guided(fields: Fields) -> Named:
    return _each(fields, "guided_", "")


def _each(fields: Fields, prefix: str, path: str) -> Named:
    taken = ((path + prefix + name, kind, fields.take(prefix + name)) for name, kind in KINDS.items())
    return [(name, _constraint(name, kind, value)) for name, kind, value in taken if value is not None]


def _constraint(name: str, kind: ConstraintKind, value: Any) -> Constraint:
    if kind is ConstraintKind.JSON_SCHEMA:
        return _schema(name, value)
    texts = value if kind is ConstraintKind.CHOICES else [value]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        wanted = "a list of strings" if kind is ConstraintKind.CHOICES else "a string"
        raise InvalidParameter(name, f"must be {wanted}, not {shown(value)}")
    return _made(name, kind, texts)


def _schema(name: str, value: Any) -> Constraint:
    """An object, or one as a string, which vLLM's clients may send."""
    return _made(name, ConstraintKind.JSON_SCHEMA, [value if isinstance(value, str) else json.dumps(value)])


def _made(name: str, kind: ConstraintKind, texts: list[str]) -> Constraint:
    try:
        return Constraint(kind, tuple(texts))
    except InvalidParameter as error:
        raise InvalidParameter(name, str(error).removeprefix(f"{kind}: ")) from None
