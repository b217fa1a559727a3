"""Tools and forms in /v1/responses: calls as items, their outputs in the next response, malformed calls as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from orchestrator.http.openai.response_items import OutputItems
from specwire.text.tool_calls.formats import FORMATS
from specwire.text.tool_calls.parser import OutputParser
from specwire.text.tool_calls.readers import ToolFunction
from tests.orchestrator.http.front import LIMIT_S, Front, another, front
from tests.orchestrator.http.test_tools import HERMES, WEATHER
from tests.orchestrator.tiny import tiny

WISH: dict[str, Any] = {"max_output_tokens": 200, "extra_body": {"seed": 5}}
TOOLS: Any = [
    {"type": "function", "name": "weather", "description": "Of a city.", "parameters": WEATHER, "strict": True},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
SEEDED: dict[str, Any] = {"seed": 5, "max_output_tokens": 200}
NAMED: Any = {"type": "function", "name": "weather"}
QUESTION = "How warm is it?"


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with (
        front(tiny(tmp_path_factory.mktemp("tiny") / "target", 1)) as known,
        another(known, chat_template=HERMES) as door,
    ):
        yield door


@pytest.fixture
def client(talking: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{talking.url}/v1", api_key="any", timeout=LIMIT_S, max_retries=0) as found:
        yield found


def model_of(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def prompt_of(door: Front, response: str) -> str:
    """What the session was begun with, as text."""
    orchestrator = door.serving.orchestrator
    record = orchestrator.sessions[response.removeprefix("resp_")].view.record
    tokenizer = orchestrator.pool.models.tokenizer_of(record)
    return str(tokenizer.decode(list(record.prompt), skip_special_tokens=False))


def test_a_call_and_what_came_of_it(talking: Front, client: openai.OpenAI) -> None:
    """The next prompt is what the template makes of the whole conversation, the call and its output included."""
    model = model_of(client)
    asked: Any = client.responses.create(model=model, input=QUESTION, tools=TOOLS, tool_choice=NAMED, **WISH)
    (call,) = asked.output
    assert (asked.status, call.type, call.name, call.status) == ("completed", "function_call", "weather", "completed")
    arguments = json.loads(call.arguments)
    jsonschema.validate(arguments, WEATHER)
    assert client.responses.retrieve(asked.id).output == asked.output
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "3 degrees"}]
    then: Any = client.responses.create(model=model, input=result, previous_response_id=asked.id, **WISH)
    called = json.dumps(arguments, ensure_ascii=False)
    assert prompt_of(talking, then.id) == (
        f'user: {QUESTION}assistant: <tool_call>{{"name": "weather", "arguments": {called}}}</tool_call>'
        "tool: 3 degreesassistant: "
    )
    by_hand: Any = [{"role": "user", "content": QUESTION}, call.model_dump(exclude_none=True), *result]
    again: Any = client.responses.create(model=model, input=by_hand, **WISH)
    assert (again.output_text, again.usage.input_tokens) == (then.output_text, then.usage.input_tokens)


def test_a_streamed_call(client: openai.OpenAI) -> None:
    model = model_of(client)
    whole: Any = client.responses.create(model=model, input=QUESTION, tools=TOOLS, tool_choice=NAMED, **WISH)
    with client.responses.stream(model=model, input=QUESTION, tools=TOOLS, tool_choice=NAMED, **WISH) as stream:
        events = [event for event in stream if event.type.startswith("response.function_call_arguments")]
        final: Any = stream.get_final_response()
    assert final.output[0].arguments == whole.output[0].arguments == events[-1].arguments  # type: ignore[union-attr]


# What Codex CLI sends: functions, those of a namespace, and tools of others.
NAMESPACED: Any = [
    {"type": "web_search"},
    TOOLS[1],
    {
        "type": "namespace",
        "name": "sky",
        "description": "Of the sky.",
        "tools": [{"type": "function", "name": "weather", "parameters": WEATHER}, {"type": "custom", "name": "draw"}],
    },
]
SKY: Any = {"type": "function", "name": "weather", "namespace": "sky"}


def test_functions_of_a_namespace(talking: Front, client: openai.OpenAI) -> None:
    """The model calls them by one name; what is left out it does not see, and a response does not list it."""
    model = model_of(client)
    asked: Any = client.responses.create(model=model, input=QUESTION, tools=NAMESPACED, tool_choice=SKY, **WISH)
    (call,) = asked.output
    assert (call.type, call.name, call.namespace) == ("function_call", "weather", "sky")
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    assert client.responses.retrieve(asked.id) == asked
    assert [each.type for each in asked.tools] == ["function", "namespace"]
    assert [each.name for each in asked.tools[1].tools] == ["weather"]
    prompt = prompt_of(talking, asked.id)
    assert '"name": "sky__weather"' in prompt
    assert "web_search" not in prompt
    assert "draw" not in prompt
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3 degrees"}
    by_hand: Any = [{"role": "user", "content": QUESTION}, call.model_dump(exclude_none=True), result]
    then: Any = client.responses.create(model=model, input=by_hand, **WISH)
    assert '<tool_call>{"name": "sky__weather", "arguments": {' in prompt_of(talking, then.id)


def test_tools_are_repeated_in_the_schemas_form(talking: Front) -> None:
    told = talking.done("/v1/responses", input=QUESTION, tools=[{"type": "function", "name": "now"}])
    assert told["tools"] == [
        {"type": "function", "name": "now", "description": None, "parameters": None, "strict": False}
    ]
    assert '{"name": "now"}' in prompt_of(talking, told["id"])  # the template sees what was sent


def test_allowed_tools(talking: Front) -> None:
    """The prompt has all tools; a call is one of those that are allowed."""
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    tools = [TOOLS[0], {**TOOLS[1], "description": "The time."}]
    told = talking.done("/v1/responses", input=QUESTION, tools=tools, tool_choice=allowed, **SEEDED)
    assert {item["name"] for item in told["output"]} == {"weather"}
    assert told["tool_choice"] == allowed
    assert "The time." in prompt_of(talking, told["id"])
    for tools_of in ([], [{"type": "function", "name": "none"}], [{"type": "web_search"}]):
        wish = {"input": QUESTION, "tools": tools, "tool_choice": {**allowed, "tools": tools_of}}
        refused = talking.post("/v1/responses", **wish)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


# As many models' templates: a system message stands first, or nowhere.
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('only as the first') }}"
    "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)


def test_what_stands_before_the_conversation_is_one_message(talking: Front) -> None:
    """Codex CLI sends two developer's messages, others `instructions` beside one: 400 with such a template."""
    items = [
        {"role": role, "content": text}
        for role, text in (("developer", "Be brief."), ("system", "Be kind."), ("user", QUESTION))
    ]
    with another(talking, chat_template=STRICT) as door:
        told = door.done("/v1/responses", input=items, instructions="You are a sailor.", **SEEDED)
        text = f"system: You are a sailor.\n\nBe brief.\n\nBe kind.\nuser: {QUESTION}\n"
        assert prompt_of(door, told["id"]) == text
        late = door.post("/v1/responses", input=[*items, items[0]])
        assert (late.status_code, "only as the first" in late.text) == (400, True)


class Weather(BaseModel):
    city: str = Field(max_length=6)
    warm: bool


def test_a_form_is_held(client: openai.OpenAI) -> None:
    done = client.responses.parse(model=model_of(client), input=QUESTION, text_format=Weather, **WISH)
    assert isinstance(done.output_parsed, Weather)


def test_a_call_in_the_input_may_have_any_arguments(client: openai.OpenAI) -> None:
    for arguments in ("{", None, {"a": 1}, "```json\n{}\n```"):
        call: Any = {"type": "function_call", "call_id": "a", "name": "now", "arguments": arguments}
        items: Any = [
            {"role": "user", "content": "x"},
            call,
            {"type": "function_call_output", "call_id": "a", "output": "y"},
        ]
        done = client.responses.create(model=model_of(client), input=items, max_output_tokens=1)
        assert done.status == "incomplete"


HELD = 'Let me see. <tool_call>{"name": "now", "arguments": {}}</tool_call>'
BROKEN = '<tool_call>{"name": "now", "arguments": {"a": </tool_call> so'


@pytest.mark.parametrize(("text", "kinds"), [(HELD, ["message", "function_call"]), (BROKEN, ["message"])])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_items_do_not_depend_on_how_a_text_comes(text: str, kinds: list[str], size: int) -> None:
    """What breaks off is text; events tell of each item what it is at the end."""
    items, parser = OutputItems("s"), OutputParser(FORMATS["hermes"], [ToolFunction("now", {})], None)
    events: list[dict[str, Any]] = []
    for start in range(0, len(text), size):
        events += items.take(parser.feed(text[start : start + size]))
    events += items.take(parser.finish())
    events += items.end(whole=True)
    assert [item["type"] for item in items.items] == kinds
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == items.items
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert deltas == items.items[0]["content"][0]["text"]
    if kinds == ["message"]:
        assert deltas == text


def test_reasoning_is_an_item_of_its_own() -> None:
    items, parser = OutputItems("s"), OutputParser(None, [], True)
    events = [*items.take(parser.feed("so so</think>\n\nYes")), *items.take(parser.finish()), *items.end(whole=False)]
    assert [(item["type"], item["status"], item["content"][0]["text"]) for item in items.items] == [
        ("reasoning", "completed", "so so"),
        ("message", "incomplete", "Yes"),
    ]
    assert [event["output_index"] for event in events if event["type"] == "response.output_item.added"] == [0, 1]
