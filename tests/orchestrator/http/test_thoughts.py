"""A template that opens the model's thought: it is free, told apart, and the answer behind it has the form wanted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from specwire.client import Client
from specwire.core.messages import FinishReason
from tests.orchestrator.http.front import CHAT, LIMIT_S, Front, another, front
from tests.orchestrator.http.test_tools import HERMES, TOOLS, checked
from tests.orchestrator.tiny import writer

TALK: Any = [{"role": "user", "content": "a thing, please"}]
# Behind "<think>" the model thinks; behind a line feed it opens its thought itself.
THOUGHT = " Hm, so"
MODEL = (f"<think>{THOUGHT}</think>", "\n<think>")
OPENED, OPENED_TWICE = HERMES + "<think>", HERMES + "<think>\n"


class Thing(BaseModel, extra="forbid"):
    colour: bool
    count: int


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"type": "boolean"}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}


def is_thing(text: str) -> bool:
    return Thing.model_validate_json(text) is not None


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


FORMS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "response_format": ({"response_format": FORMAT}, is_thing),
    "any object": ({"response_format": {"type": "json_object"}, "logit_bias": {"93": 40}}, is_object),
    "json": ({"structured_outputs": {"json": SCHEMA}}, is_thing),
    "regex": ({"structured_outputs": {"regex": "[ab]{2}/[0-9]"}}, re.compile("[ab]{2}/[0-9]").fullmatch),
    "choice": ({"structured_outputs": {"choice": ["yes", 'no "one"']}}, ("yes", 'no "one"').__contains__),
    "grammar": ({"guided_grammar": 'start: "(" /[ab]/ ")"'}, re.compile(r"\([ab]\)").fullmatch),
}


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(writer(tmp_path_factory.mktemp("writer"), *MODEL)) as running:
        yield running


@pytest.fixture(scope="module", params=[OPENED, OPENED_TWICE], ids=["opened", "opened twice"])
def door(known: Front, request: pytest.FixtureRequest) -> Iterator[Front]:
    with another(known, chat_template=request.param) as running:
        yield running


@pytest.mark.parametrize("form", FORMS)
def test_the_form_begins_behind_the_thought(door: Front, form: str) -> None:
    more, fits = FORMS[form]
    asked: dict[str, Any] = {"messages": TALK, "temperature": 0, "max_tokens": 100, **more}
    choice = door.done(CHAT, **asked)["choices"][0]
    message = choice["message"]
    assert (choice["finish_reason"], message["reasoning_content"]) == ("stop", THOUGHT.strip())
    assert fits(message["content"])
    deltas = [event["choices"][0]["delta"] for event in door.events(CHAT, **asked) if event["choices"]]
    for field in ("content", "reasoning_content"):
        assert "".join(each.get(field) or "" for each in deltas) == message[field]


def test_the_official_client_parses_it(door: Front) -> None:
    with openai.OpenAI(base_url=f"{door.url}/v1", api_key="any", timeout=LIMIT_S, max_retries=0) as client:
        model = client.models.list().data[0].id
        done = client.chat.completions.parse(
            model=model, messages=TALK, response_format=Thing, temperature=0, max_completion_tokens=100
        )
        assert isinstance(done.choices[0].message.parsed, Thing)
        response = client.responses.parse(
            model=model, input="a thing, please", text_format=Thing, temperature=0, max_output_tokens=100
        )
        again = client.responses.retrieve(response.id)
    assert isinstance(response.output_parsed, Thing)
    for each in (response, again):
        assert [(item.type, item.status) for item in each.output] == [  # type: ignore[union-attr]
            ("reasoning", "completed"),
            ("message", "completed"),
        ]
        assert each.status == "completed"
        assert is_thing(each.output_text)


def test_over_grpc_likewise(door: Front) -> None:
    with Client(door.serving.address, patience=0.0) as client:
        for more in ({"json_schema": SCHEMA}, {"regex": "yes|no"}, {"choices": ["yes"]}, {"grammar": 'start: "yes"'}):
            done = client.chat(TALK, max_tokens=100, **more)
            assert (done.finish_reason, done.reasoning) == (FinishReason.EOS, THOUGHT.strip())
            assert is_thing(done.content) if "json_schema" in more else done.content in ("yes", "no")


def test_forced_calls_likewise(door: Front) -> None:
    asked: dict[str, Any] = {"messages": TALK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 300}
    choice = door.done(CHAT, temperature=0, parallel_tool_calls=False, **asked)["choices"][0]
    assert (choice["finish_reason"], choice["message"]["reasoning_content"]) == ("tool_calls", THOUGHT.strip())
    with openai.OpenAI(base_url=f"{door.url}/v1", api_key="any", timeout=LIMIT_S, max_retries=0) as client:
        done = client.chat.completions.create(
            model=client.models.list().data[0].id, temperature=0, parallel_tool_calls=False, **asked
        )
    (call,) = done.choices[0].message.tool_calls or []
    checked(call)


def test_a_thought_that_is_cut_is_no_answer(door: Front) -> None:
    choice = door.done(CHAT, messages=TALK, temperature=0, max_tokens=3, response_format=FORMAT)["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")


def test_where_the_template_opens_none_the_form_is_all(known: Front) -> None:
    """A user's message that looks like an opened thought opens none."""
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "response_format": FORMAT}
    for template in (HERMES, HERMES + "{# <think> #}", HERMES + "<think>\n\n</think>\n\n"):
        with another(known, chat_template=template) as door:
            choice = door.done(CHAT, messages=[{"role": "user", "content": "x<think>"}], **asked)["choices"][0]
            assert choice["finish_reason"] == "stop"
            assert is_thing(choice["message"]["content"])
            assert "reasoning_content" not in choice["message"]


def test_a_form_that_is_none_is_named_by_the_field(door: Front) -> None:
    wrong = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "frob"}}}
    refused = door.post(CHAT, messages=TALK, response_format=wrong)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")
