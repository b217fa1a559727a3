"""Schemas that the library would serve wrong: told otherwise or refused by keyword; others are as they were."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from specwire.core.invalid import InvalidParameter
from specwire.core.law.constraint import Constraint, ConstraintKind
from specwire.text.constraint_process import Matching
from specwire.text.json_schema import served_grammar, served_schema
from tests.text.schema_conformance import Table, grammars, random_schema, try_schema
from tests.text.test_constrained import ids

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}


def begun(schema: dict[str, Any]) -> Matching:
    return grammars().begin(Constraint(ConstraintKind.JSON_SCHEMA, (json.dumps(schema),)))


def fits(schema: dict[str, Any], *documents: str) -> list[bool]:
    return [begun(schema).take([*ids(text), 0]) == len(ids(text)) + 1 for text in documents]


ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"$ref": "#"}, r"\$ref: no finite document fits #"),
    ({"$defs": {"x": ENDLESS}, "$ref": "#/$defs/x"}, r"\$ref: no finite document fits #/\$defs/x"),
    ({"$defs": {"x": ENDLESS}, "properties": {"b": {"$ref": "#/$defs/x"}}}, r"\$ref: "),
    ({"$defs": {"x": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/x"}}}, "$ref": "#/$defs/x"}, r"\$ref"),
    ({"type": "object", "minProperties": 2}, "minProperties: 2 is not served where 0 are required"),
    ({"items": {"type": "object", "required": ["a"], "minProperties": 3}}, "minProperties: 3 is not served"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": INTEGER}, "contains"),
    ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems"),
    ({"type": "string", "not": {"const": "a"}}, "not"),
    ({"type": "string", "if": {"minLength": 1}, "then": {"maxLength": 2}}, '"if", "then"'),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, "propertyNames"),
    ({"type": "object", "patternProperties": {"^a": TEXT, "b$": INTEGER}}, "patternProperty"),
    ({"type": "string", "format": "frob"}, "format: frob"),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf"),
    ({"enum": []}, "Unsatisfiable"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    ({"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 6}, "multiple of 7"),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=[json.dumps(schema)[:40] for schema, _ in REFUSED])
def test_what_could_not_be_held_is_refused_at_the_start(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        begun(schema)


def test_an_exclusive_bound_is_never_reached() -> None:
    for schema, documents in (
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ("0", "0.0", "0.25", "0.5")),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ("0", "-0", "0.25", "0.125")),
        ({"type": "number", "exclusiveMaximum": -1, "minimum": -1.5}, ("-1", "-1.0", "-1.25", "-1.5")),
        ({"allOf": [{"exclusiveMinimum": 2}, {"type": "number", "maximum": 2.5}]}, ("2", "2.0", "2.25", "2.5")),
        ({"type": "integer", "exclusiveMinimum": 2, "maximum": 4}, ("2", "5", "3", "4")),
    ):
        assert fits(schema, *documents) == [False, False, True, True]


def test_dates_and_times_are_such_as_parsers_take() -> None:
    date, time, both = ({"type": "string", "format": name} for name in ("date", "time", "date-time"))
    known = {"2023-02-28": True, "2023-02-29": False, "2024-02-29": True, "1900-02-29": False, "2000-02-29": True}
    known |= {"2023-12-31": True, "2023-04-31": False, "0000-01-01": False, "0001-01-01": True}
    clock = {"12:40:59Z": True, "12:40:60Z": False, "00:00:00.5+01:00": True}
    for day, right in known.items():
        assert fits(date, f'"{day}"') == [right], day
        assert fits(both, f'"{day}T12:40:59Z"') == [right], day
    for at, right in clock.items():
        assert fits(time, f'"{at}"') == fits(both, f'"2023-01-01T{at}"') == [right], at
    nullable = {"type": ["string", "null"], "format": "date", "pattern": "^2"}
    assert fits(nullable, "null", '"2023-01-01"', '"1023-01-01"', '"2023-02-29"') == [True, True, False, False]


def test_what_is_served_right_stays_as_it_is() -> None:
    tree = {
        "type": "object",
        "properties": {"next": {"$ref": "#"}, "exclusiveMinimum": {"type": "number", "minimum": 0}},
    }
    several = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"], "minProperties": 2}
    data = {"enum": [{"exclusiveMinimum": 0, "format": "date"}], "default": {"format": "date"}}
    for schema in (tree, several, data, {"type": "object", "additionalProperties": INTEGER, "minProperties": 1}):
        assert served_schema(schema) == schema
        begun(schema)
    assert fits(tree, '{"next": {"next": {}}}') == [True]


def test_what_is_no_schema_is_the_librarys_to_refuse() -> None:
    for schema in (
        {"properties": 5},
        {"required": 5, "type": "object"},
        {"minProperties": "a"},
        {"minItems": "a", "$ref": 5},
    ):
        assert served_schema(schema) == schema


def test_a_reference_by_what_is_no_index_leads_nowhere() -> None:
    for name in ("²", "01", "9" * 5000):
        schema = {"$ref": f"#/prefixItems/{name}", "prefixItems": [{}]}
        assert served_schema(schema) == schema


def test_schemas_within_a_grammar_are_served_alike() -> None:
    grammar = 'start: "%json {" a b\na: %json {"minimum": 1}\nb: %json   {"exclusiveMinimum": 0}\n'
    assert served_grammar(grammar) == grammar.replace('{"exclusiveMinimum": 0}', '{"minimum": 1e-09}')
    refused = 'start: %json {"type": "object", "minProperties": 2}'
    with pytest.raises(InvalidParameter, match="^grammar: minProperties: 2"):
        grammars().begin(Constraint(ConstraintKind.GRAMMAR, (refused,)))


@pytest.mark.parametrize("seed", range(60))
def test_no_document_of_a_random_schema_is_wrong_or_stuck(seed: int) -> None:
    table = Table()
    try_schema(random_schema(random.Random(seed)), table, 3, seed)
    assert not table.wrong
    assert table.accepted + table.refused == 1


@pytest.mark.parametrize(("schema", "alone"), [({"type": "object", "minProperties": 2}, 1), ({"not": {}}, 0)])
def test_what_the_library_alone_would_serve_wrong_is_told_apart(schema: dict[str, Any], alone: int) -> None:
    table = Table()
    try_schema(schema, table, 1, 0)
    assert (table.accepted, table.refused, table.alone) == (0, 1, alone)


PATTERNED: list[dict[str, Any]] = [
    {"properties": {"ab": INTEGER}, "patternProperties": {"^a": TEXT}, "additionalProperties": False},
    {"properties": {"ab": TEXT}, "patternProperties": {"^a": TEXT}, "required": ["ab"]},
    {"properties": {"ab": INTEGER}, "patternProperties": {"^(ab|ax)$": {"maximum": 9}}, "additionalProperties": False},
    {"properties": {"ab": {"minimum": 3}}, "patternProperties": {"^.*$": INTEGER}, "required": ["ab"]},
    {"properties": {"ab": {"enum": [1, 2, "a"]}}, "patternProperties": {"b$": {"enum": [2, "a"]}}, "required": ["ab"]},
]


@pytest.mark.parametrize("schema", PATTERNED, ids=range(len(PATTERNED)))
def test_a_pattern_that_matches_a_declared_property_holds_for_it_too(schema: dict[str, Any]) -> None:
    table = Table()
    try_schema({"type": "object", **schema}, table, 20, 0)
    assert (table.accepted, table.wrong) == (1, [])
    assert table.documents
