"""Tools through the official client: forced calls by grammar, and texts of every format by models that write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from specwire.text.tool_calls.formats import FORMATS
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
NAMES = sorted(FORMATS)


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


@pytest.mark.parametrize("form", NAMES)
def test_forced_calls_in_every_format(tiny_door: Front, form: str) -> None:
    with another(tiny_door, chat_template=HERMES, tool_format=form) as door, client_of(door) as client:
        model = client.models.list().data[0].id
        common: Any = {"model": model, "messages": TALK, "tools": TOOLS, "max_completion_tokens": 200, "seed": 5}
        named: Any = {"type": "function", "function": {"name": "weather"}}
        done = client.chat.completions.create(**common, tool_choice=named, n=3)
        for choice in done.choices:
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
            (call,) = choice.message.tool_calls or []
            assert call.type == "function"
            assert call.function.name == "weather"
            checked(call)
        with client.chat.completions.stream(**common, tool_choice=named) as stream:
            gathered = stream.get_final_completion().choices[0]
        (told,) = gathered.message.tool_calls or []
        assert gathered.finish_reason == "tool_calls"
        assert told.function.arguments == (done.choices[0].message.tool_calls or [])[0].function.arguments
        some = client.chat.completions.create(**common, tool_choice="required", parallel_tool_calls=False)
        (call,) = some.choices[0].message.tool_calls or []
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


# What a model that knows each format writes; a constraint with one choice has the tiny one write it.
CALLS: list[tuple[str, dict[str, Any]]] = [("weather", {"city": "Köln", "unit": "C"}), ("now", {})]
WRITTEN: dict[str, str] = {name: form.written(CALLS) for name, form in FORMATS.items()} | {
    "hermes": 'Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "unit": "C"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3": '{"name": "weather", "parameters": {"city": "Köln", "unit": "C"}}; {"name": "now", "parameters": {}}',
    "mistral": 'Well. [TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln", "unit": "C"}}, {"name": "now"}]',
    "json": '[{"name": "weather", "arguments": {"city": "Köln", "unit": "C"}}, {"name": "now"}]',
}
BROKEN = '<tool_call>\n{"name": "weather", "arguments": {"city": oops}}\n</tool_call>'


def writing(text: str, **more: Any) -> Any:
    return {"messages": TALK, "max_completion_tokens": 300, "extra_body": {"guided_choice": [text], **more}}


@pytest.mark.parametrize("form", NAMES)
def test_what_a_model_writes_is_told_as_calls(tiny_door: Front, form: str) -> None:
    text = WRITTEN[form]
    with another(tiny_door, chat_template=HERMES, tool_format=form) as door, client_of(door) as client:
        asked: Any = {"model": client.models.list().data[0].id, "tools": TOOLS, **writing(text)}
        done = client.chat.completions.create(**asked, n=2)
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0]
        for choice in (*done.choices, streamed):
            assert choice.finish_reason == "tool_calls"
            assert (choice.message.content or "") == ("Well." if text.startswith("Well.") else "")
            calls = choice.message.tool_calls or []
            assert [call.function.name for call in calls] == ["weather", "now"]
            assert [call.function.arguments for call in calls] == ['{"city": "Köln", "unit": "C"}', "{}"]
            assert len({call.id for call in calls}) == 2


def test_what_is_no_call_is_content(tiny_door: Front) -> None:
    with another(tiny_door, chat_template=HERMES) as door, client_of(door) as client:
        model = client.models.list().data[0].id
        for text in (BROKEN, WRITTEN["hermes"].replace("weather", "other", 1).replace("now", "other")):
            choice = client.chat.completions.create(model=model, tools=TOOLS, **writing(text)).choices[0]
            assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", text, None)
        events = door.events(CHAT, tools=TOOLS, messages=TALK, guided_choice=[BROKEN], max_tokens=300)
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        off = client.chat.completions.create(model=model, tools=TOOLS, tool_choice="none", **writing(WRITTEN["hermes"]))
        assert (off.choices[0].finish_reason, off.choices[0].message.content) == ("stop", WRITTEN["hermes"])
        cut = client.chat.completions.create(
            model=model, tools=TOOLS, **{**writing(WRITTEN["hermes"]), "max_completion_tokens": 12}
        )
        assert (cut.choices[0].finish_reason, cut.choices[0].message.tool_calls) == ("length", None)


def streamed(client: openai.OpenAI, asked: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The message as clients put it together, and why it ended."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    calls, reason = message["tool_calls"], ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                if call.index == len(calls):
                    calls.append({"id": call.id, "type": call.type, "function": {"name": "", "arguments": ""}})
                told = call.function
                calls[call.index]["function"]["name"] += (told and told.name) or ""
                calls[call.index]["function"]["arguments"] += (told and told.arguments) or ""
    return message, reason


@pytest.mark.parametrize("form", ["hermes", "pythonic"])
def test_a_call_that_breaks_off_is_none_and_the_talk_goes_on(tiny_door: Front, form: str) -> None:
    """Behind a whole one; cut by the model's end, a stop string or the length, or malformed."""
    text = FORMATS[form].written([CALLS[0], ("weather", {"city": "Bonn", "unit": "C"})])
    cut = text[: text.rindex("Bonn") + 2]
    with another(tiny_door, chat_template=HERMES, tool_format=form) as door, client_of(door) as client:
        common: Any = {"model": client.models.list().data[0].id, "tools": TOOLS}
        length = door.done("/tokenize", prompt=cut)["count"]
        ways: list[tuple[dict[str, Any], str]] = [
            (writing(cut), "stop"),
            ({**writing(text), "stop": "nn"}, "stop"),
            ({**writing(text), "max_completion_tokens": length}, "length"),
            (writing(f'{cut}\x00"'), "stop"),
        ]
        for way, wanted in ways:
            message, reason = streamed(client, {**common, **way})
            assert (reason, len(message["tool_calls"])) == (wanted, 2)
            choice = client.chat.completions.create(**common, **way).choices[0]
            (whole,) = choice.message.tool_calls or []
            assert choice.finish_reason == ("tool_calls" if wanted == "stop" else "length")
            assert json.loads(whole.function.arguments) == CALLS[0][1]
            assert "B" in (choice.message.content or "")
            results: Any = [
                {"role": "tool", "tool_call_id": call["id"], "content": "no"} for call in message["tool_calls"]
            ]
            talk: Any = [*TALK, message, *results, choice.message, results[0]]
            done = client.chat.completions.create(**common, messages=talk, max_completion_tokens=1)
            assert done.usage is not None
            assert done.usage.completion_tokens == 1


def test_a_stop_string_ends_a_text_with_calls(tiny_door: Front) -> None:
    with another(tiny_door, chat_template=HERMES) as door, client_of(door) as client:
        asked: Any = {"tools": TOOLS, "stop": "</tool_call>", **writing(WRITTEN["hermes"])}
        choice = client.chat.completions.create(model=client.models.list().data[0].id, **asked).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Well.")
    assert [call.function.name for call in choice.message.tool_calls or ()] == ["weather"]


def test_the_talk_goes_on_with_calls_and_results(tiny_door: Front) -> None:
    with another(tiny_door, chat_template=HERMES) as door, client_of(door) as client:
        model = client.models.list().data[0].id
        called = client.chat.completions.create(model=model, tools=TOOLS, **writing(WRITTEN["hermes"])).choices[0]
        history: Any = [*TALK, called.message]
        for call in called.message.tool_calls or ():
            history.append({"role": "tool", "tool_call_id": call.id, "content": "23"})
        told = door.done("/tokenize", messages=[json.loads(_json(each)) for each in history])
        text = door.done("/detokenize", tokens=told["tokens"])["prompt"]
        done = client.chat.completions.create(model=model, messages=history, tools=TOOLS, max_completion_tokens=3)
    assert 'assistant: Well.<tool_call>{"name": "weather", "arguments": {"city": "Köln", "unit": "C"}}</tool' in text
    assert text.endswith("tool: 23tool: 23assistant: ")
    assert done.usage is not None
    assert done.usage.completion_tokens == 3


def test_a_template_that_shows_ids_gets_those_that_the_model_writes(tiny_door: Front) -> None:
    template = (
        "{# <|tool_call_begin|> #}{% for m in messages %}{% for call in m.tool_calls or [] %}[{{ call.id }}]"
        "{% endfor %}{{ m.tool_call_id or '' }}={{ m.content }} {% endfor %}{{ tools }}"
    )
    calls = [
        {"id": each, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for each, name in (("a", "weather"), ("b", "now"), ("a", "now"))
    ]
    talk: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": calls[:2]},
        {"role": "tool", "tool_call_id": "b", "content": "5"},
        {"role": "tool", "tool_call_id": "a", "content": "6"},
        {"role": "assistant", "tool_calls": calls[2:]},
        {"role": "tool", "tool_call_id": "a", "content": "7"},
        {"role": "tool", "tool_call_id": "c", "content": "8"},
    ]
    with another(tiny_door, chat_template=template) as door:
        told = door.done("/tokenize", messages=talk)
        text = door.done("/detokenize", tokens=told["tokens"])["prompt"]
    shown = "[functions.weather:0][functions.now:1]= functions.now:1=5 functions.weather:0=6 "
    assert text.startswith(f"{shown}[functions.now:2]= functions.now:2=7 c=8 ")


def _json(message: Any) -> str:
    return json.dumps(message if isinstance(message, dict) else message.model_dump(exclude_none=True))


def test_strict_functions_are_held_to_their_schema(tiny_door: Front) -> None:
    """With any choice: what the model writes of its own accord is text, or a call that fits."""
    strict = [{"type": "function", "function": {**each["function"], "strict": True}} for each in TOOLS]
    with another(tiny_door, chat_template=HERMES) as door:
        answer = door.done(CHAT, messages=TALK, tools=strict, max_tokens=8, seed=1)
        assert answer["choices"][0]["finish_reason"] in ("stop", "length")
        refused = door.post(CHAT, messages=TALK, tools=strict, response_format={"type": "json_object"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")
        odd = {"type": "function", "function": {"name": "a", "parameters": {"properties": {"x": {"type": "frob"}}}}}
        refused = door.post(CHAT, messages=TALK, tools=[odd], tool_choice="required")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


def test_reasoning_is_told_apart(tiny_door: Front) -> None:
    text = f"<think>\nHm, {WRITTEN['hermes']}\n</think>\n\n{WRITTEN['hermes']}"
    template = HERMES + "{# <think> </think> #}"
    with another(tiny_door, chat_template=template) as door, client_of(door) as client:
        asked: Any = {"model": client.models.list().data[0].id, "tools": TOOLS, **writing(text)}
        done = client.chat.completions.create(**asked).choices[0].message
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0].message
        without = (
            client.chat.completions.create(model=asked["model"], **writing("<think>a</think>b")).choices[0].message
        )
    for message in (done, streamed):
        assert (message.model_extra or {})["reasoning_content"] == f"Hm, {WRITTEN['hermes']}"
        assert message.content == "Well."
        assert len(message.tool_calls or ()) == 2
    assert ((without.model_extra or {})["reasoning_content"], without.content) == ("a", "b")


def test_a_reader_that_comes_back_hears_all_of_it_again(tiny_door: Front) -> None:
    """No event of such a stream has an id; the same request is the same session, its calls have the same ids."""
    body: dict[str, Any] = {"messages": TALK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 100, "seed": 1}
    with another(tiny_door, chat_template=HERMES) as door:
        first = door.done(CHAT, request_id="twice", **body)["choices"][0]
        again = door.done(CHAT, request_id="twice", **body)["choices"][0]
        stream = door.client.post(CHAT, json={**body, "request_id": "twice", "stream": True})
        refused = door.client.post(
            CHAT,
            json={**body, "request_id": "twice", "stream": True},
            headers={"Last-Event-ID": "5-0000000000000000-0-1"},
        )
    assert first == again
    assert "\nid: " not in stream.text
    assert not stream.text.startswith("id: ")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Last-Event-ID")
