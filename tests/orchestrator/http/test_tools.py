"""Tools through the official client: forced calls by grammar, and texts of every format by models that write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.orchestrator.http.front import CHAT, LIMIT_S, Front, another, front
from tests.orchestrator.tiny import tiny

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "unit": {"$ref": "#/$defs/Unit"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": ["C", "F"]}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
TALK: Any = [{"role": "user", "content": "How warm is it?"}]
HERMES = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
FORMATS = ("hermes", "llama3", "mistral", "json")


@pytest.fixture(scope="module")
def tiny_door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("tiny")
    target = tiny(folder / "target", 1)
    with front(target, tiny(folder / "draft", 2, like=target, noise=0.01)) as running:
        yield running


def client_of(door: Front) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{door.url}/v1", api_key="any", timeout=LIMIT_S, max_retries=0)


def checked(call: Any) -> None:
    assert call.type == "function"
    assert call.id.startswith("call_")
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        jsonschema.validate(arguments, WEATHER)
    else:
        assert (call.function.name, arguments) == ("now", {})


@pytest.mark.parametrize("form", FORMATS)
def test_forced_calls_in_every_format(tiny_door: Front, form: str) -> None:
    with another(tiny_door, chat_template=HERMES, tool_format=form) as door, client_of(door) as client:
        model = client.models.list().data[0].id
        common: Any = {"model": model, "messages": TALK, "tools": TOOLS, "max_completion_tokens": 200, "seed": 5}
        named = {"type": "function", "function": {"name": "weather"}}
        done = client.chat.completions.create(**common, tool_choice=named, n=3)
        for choice in done.choices:
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None), repr(choice.message.content)
            (call,) = choice.message.tool_calls or ()
            assert call.type == "function"
            assert call.function.name == "weather"
            checked(call)
        with client.chat.completions.stream(**common, tool_choice=named) as stream:
            gathered = stream.get_final_completion().choices[0]
        (told,) = gathered.message.tool_calls or ()
        assert gathered.finish_reason == "tool_calls"
        assert told.function.arguments == (done.choices[0].message.tool_calls or [])[0].function.arguments
        some = client.chat.completions.create(**common, tool_choice="required", parallel_tool_calls=False)
        (call,) = some.choices[0].message.tool_calls or ()
        checked(call)


def test_whoever_drafts_the_calls_are_the_same(tiny_door: Front) -> None:
    with another(tiny_door, chat_template=HERMES) as door:
        asked: dict[str, Any] = {"messages": TALK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 120}
        for more in ({"temperature": 0}, {"seed": 3}, {"seed": 4}):
            plain = door.done(CHAT, **asked, **more, drafting="off")["choices"][0]["message"]
            ngram = door.done(CHAT, **asked, **more, drafting="ngram")["choices"][0]["message"]
            drafted = door.done(CHAT, **asked, **more)["choices"][0]["message"]
            for message in (plain, ngram, drafted):
                for call in message.get("tool_calls", ()):
                    del call["id"]
            assert plain == ngram == drafted
