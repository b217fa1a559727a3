"""What form an answer must have, as OpenAI's and vLLM's clients ask for it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from orchestrator.chat.fields import Fields
from orchestrator.http.openai.requests import take_form
from specwire.core.invalid import InvalidParameter
from specwire.core.law.constraint import Constraint, ConstraintKind
from tests.orchestrator.http.front import CHAT, COMPLETIONS, Front, client_of

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
TALK: Any = [{"role": "user", "content": "a thing, please"}]


def of(kind: ConstraintKind, *texts: str) -> Constraint:
    return Constraint(kind, texts)


OBJECT = of(ConstraintKind.JSON_SCHEMA, '{"type": "object"}')
UNDERSTOOD: list[tuple[dict[str, Any], Constraint | None]] = [
    ({}, None),
    ({"response_format": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, OBJECT),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        of(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    ),
    ({"response_format": FORMAT}, of(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA))),
    ({"structured_outputs": {"json": {"type": "object"}}}, OBJECT),
    ({"structured_outputs": {"json": '{"type": "object"}'}}, OBJECT),
    ({"structured_outputs": {"json_object": True}}, OBJECT),
    ({"structured_outputs": {"regex": "a+"}}, of(ConstraintKind.REGEX, "a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, of(ConstraintKind.CHOICES, "a", "b")),
    ({"structured_outputs": {"grammar": "start: /a/"}}, of(ConstraintKind.GRAMMAR, "start: /a/")),
    ({"guided_json": {"type": "object"}}, OBJECT),
    ({"guided_regex": "a+"}, of(ConstraintKind.REGEX, "a+")),
    ({"guided_choice": ["a"]}, of(ConstraintKind.CHOICES, "a")),
    ({"guided_grammar": "start: /a/"}, of(ConstraintKind.GRAMMAR, "start: /a/")),
]


@pytest.mark.parametrize(("body", "constraint"), UNDERSTOOD)
def test_what_is_asked_for(body: dict[str, Any], constraint: Constraint | None) -> None:
    fields = Fields(body)
    assert take_form(fields) == constraint
    fields.end()


MISTAKEN: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format: must be an object"),
    ({"response_format": {}}, "response_format.type: is required"),
    ({"response_format": {"type": "xml"}}, "response_format.type: must be one of text, json_object, json_schema"),
    ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x: is not a field"),
    ({"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema: must be a JSON object"),
    ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema: is not a field"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: is required"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "json_schema.schema: is required"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "schema: must be a JSON object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}}, "json_schema.x: is not"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex: must be a string, not 5"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice: must be a list of strings, not 'a'"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "contradicts structured_outputs.regex"),
    ({"structured_outputs": {"other": 1}}, "structured_outputs.other: is not a field"),
    ({"guided_choice": []}, "guided_choice: must be from 1 to 1024, not 0"),
    ({"guided_regex": ""}, "guided_regex: must not be empty"),
    ({"guided_json": "{"}, "guided_json: is no JSON"),
    ({"response_format": FORMAT, "guided_regex": "a"}, "guided_regex: contradicts response_format"),
]


@pytest.mark.parametrize(("body", "message"), MISTAKEN)
def test_what_is_mistaken(body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        take_form(Fields(body))
    assert message in str(caught.value)


def test_the_official_client_gets_what_it_asks_for(tiny_door: Front) -> None:
    with client_of(tiny_door) as client:
        model = tiny_door.model
        done = client.chat.completions.create(
            model=model, messages=TALK, response_format=FORMAT, max_completion_tokens=200, n=2, seed=4
        )
        stream = client.chat.completions.create(
            model=model, messages=TALK, response_format=FORMAT, max_completion_tokens=200, seed=4, stream=True
        )
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        own: Any = {"type": "json_object", "schema": SCHEMA}
        likewise = client.chat.completions.create(
            model=model, messages=TALK, response_format=own, max_completion_tokens=200, seed=4
        )
        chosen = client.completions.create(
            model=model, prompt="x", max_tokens=50, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
        )
        cut = client.chat.completions.create(
            model=model, messages=TALK, response_format={"type": "json_object"}, max_completion_tokens=1
        )
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model=model,
                messages=TALK,
                response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "frob"}}},
            )
    for choice in done.choices:
        assert choice.finish_reason == "stop"
        thing = json.loads(choice.message.content or "")
        assert thing["colour"] in ("red", "green")
        assert 0 <= thing["count"] < 100
    assert streamed == done.choices[0].message.content == likewise.choices[0].message.content
    assert (chosen.choices[0].finish_reason, chosen.choices[0].text) in (("stop", "yes"), ("stop", "no"))
    assert cut.choices[0].finish_reason == "length"
    assert caught.value.param == "response_format"
    assert "json_schema: Invalid type: frob" in str(caught.value)


def test_what_a_verifier_cannot_do_is_refused_by_the_field(door: Front) -> None:
    """Its tokens are numbers, which no form is of."""
    for path, body in ((CHAT, {"messages": TALK}), (COMPLETIONS, {"prompt": "5"})):
        answer = door.post(path, response_format={"type": "json_object"}, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
