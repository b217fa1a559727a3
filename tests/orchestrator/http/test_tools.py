"""Tools and thoughts over both doors: calls forced by grammar, texts of every format, answers as they come."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from orchestrator.admission import MOST_JSON_BYTES
from orchestrator.api.requests import digest_of
from orchestrator.chat.models import AnswerForm, call_id
from orchestrator.chat.talk import talk_of
from specwire.client import Chat, Chunk, Client, Completion, Finished, SpecwireError, Started
from specwire.client.events import Event, PartialCompletion
from specwire.client.requests import generate_request
from specwire.core.invalid import MOST_PARTS, InvalidParameter
from specwire.core.messages import FinishReason
from specwire.core.text import extend_hash
from specwire.text.tool_calls.formats import FORMATS
from specwire.text.tool_calls.readers import ToolFunction
from specwire.v1 import generation_pb2 as pb
from specwire.v1 import generation_pb2_grpc
from tests.orchestrator.http.front import CHAT, HERMES, LIMIT_S, Front, another, client_of, front
from tests.orchestrator.tiny import writer

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "unit": {"$ref": "#/$defs/Unit"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": ["C", "F"]}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
TALK: Any = [{"role": "user", "content": "How warm is it?"}]
NAMES = sorted(FORMATS)


@contextmanager
def called(known: Front, template: str = HERMES, form: str = "") -> Iterator[tuple[Front, Client]]:
    """An orchestrator with both doors, and a client of gRPC's."""
    with (
        another(known, chat_template=template, tool_format=form) as door,
        Client(door.serving.address, patience=0.0) as client,
    ):
        yield door, client


def checked(name: str, arguments: str) -> None:
    if name == "weather":
        jsonschema.validate(json.loads(arguments), WEATHER)
    else:
        assert (name, json.loads(arguments)) == ("now", {})


@pytest.mark.parametrize("form", NAMES)
def test_forced_calls_in_every_format(tiny_door: Front, form: str) -> None:
    with another(tiny_door, chat_template=HERMES, tool_format=form) as door, client_of(door) as client:
        common: Any = {"model": door.model, "messages": TALK, "tools": TOOLS, "max_completion_tokens": 200, "seed": 5}
        named: Any = {"type": "function", "function": {"name": "weather"}}
        done = client.chat.completions.create(**common, tool_choice=named, n=3)
        for choice in done.choices:
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
            (call,) = choice.message.tool_calls or []
            assert (call.type, call.function.name, call.id[:5]) == ("function", "weather", "call_")
            checked(call.function.name, call.function.arguments)
        with client.chat.completions.stream(**common, tool_choice=named) as stream:
            gathered = stream.get_final_completion().choices[0]
        (told,) = gathered.message.tool_calls or []
        assert gathered.finish_reason == "tool_calls"
        assert told.function.arguments == (done.choices[0].message.tool_calls or [])[0].function.arguments
        some = client.chat.completions.create(**common, tool_choice="required", parallel_tool_calls=False)
        (call,) = some.choices[0].message.tool_calls or []
        checked(call.function.name, call.function.arguments)


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
        asked: Any = {"model": door.model, "tools": TOOLS, **writing(text)}
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
        with Client(door.serving.address, patience=0.0) as grpcs:
            told = grpcs.chat(TALK, tools=TOOLS, choices=[text], max_tokens=300)
        assert (told.text, told.content) == (text, done.choices[0].message.content or "")
        assert [(each.name, each.arguments) for each in told.tool_calls] == [
            (each.function.name, each.function.arguments) for each in done.choices[0].message.tool_calls or []
        ]


def test_what_is_no_call_is_content(tiny_door: Front) -> None:
    """Over both doors."""
    whole = WRITTEN["hermes"]
    texts: list[tuple[str, dict[str, Any], int, str]] = [
        (BROKEN, {}, 300, "stop"),
        (whole.replace("weather", "other", 1).replace("now", "other"), {}, 300, "stop"),
        (whole, {"tool_choice": "none"}, 300, "stop"),
        (whole, {}, 12, "length"),
    ]
    with called(tiny_door) as (door, client):
        for text, more, most, reason in texts:
            asked: dict[str, Any] = {"messages": TALK, "tools": TOOLS, "guided_choice": [text], "max_tokens": most}
            choice = door.done(CHAT, **asked, **more)["choices"][0]
            told = client.chat(TALK, tools=TOOLS, choices=[text], max_tokens=most, **more)
            assert (choice["finish_reason"], choice["message"]["content"]) == (reason, told.text)
            assert (told.content, told.tool_calls) == (told.text, ())
            assert "tool_calls" not in choice["message"]
            assert text.startswith(told.text)
        events = door.events(CHAT, tools=TOOLS, messages=TALK, guided_choice=[BROKEN], max_tokens=300)
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        over_grpc = list(client.generate(Chat(TALK, TOOLS), choices=[BROKEN], max_tokens=300))
        deltas = [event.delta for event in over_grpc if isinstance(event, Chunk | Finished) and event.delta]
        assert {call.whole for delta in deltas for call in delta.tool_calls} == {None, False}
        plain = client.complete("How warm is it?", max_tokens=3)
        assert (plain.content, plain.tool_calls) == ("", ())


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
        common: Any = {"model": door.model, "tools": TOOLS}
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
        asked: Any = {"model": door.model, "tools": TOOLS, **writing(text)}
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


# ----------------------------------------------------------------------------------------------------------------------
# Chats over gRPC: the answer that HTTP gives, as it comes, told again from anywhere; what is wrong, by field.

NAMED: Any = {"type": "function", "function": {"name": "weather"}}


def checked_completion(done: Completion) -> None:
    assert (done.content, done.reasoning) == ("", "")
    assert done.tool_calls
    for index, call in enumerate(done.tool_calls):
        assert call.id == call_id(done.session_id, index)
        checked(call.name, call.arguments)


def gathered(events: list[Event]) -> Completion:
    whole = PartialCompletion()
    for event in events:
        whole.add(event)
    return whole.completion()


def test_an_answer_comes_in_deltas_and_goes_on_from_wherever_its_reader_left(tiny_door: Front) -> None:
    text = f"<think>\nHm.\n</think>\n\n{WRITTEN['hermes']}"
    with called(tiny_door, HERMES + "{# <think> </think> #}") as (_, client):
        events = list(client.generate(Chat(TALK, TOOLS), choices=[text], max_tokens=300))
        whole, started = gathered(events), events[0]
        assert isinstance(started, Started)
        assert (whole.reasoning, whole.content) == ("Hm.", "Well.")
        assert [(each.name, json.loads(each.arguments)) for each in whole.tool_calls] == CALLS
        assert started.prompt_hash is not None
        position, known = started.prompt_tokens, started.prompt_hash
        for count in range(1, len(events)):
            rest = list(client.watch(started.session_id, position, prefix_hash=known))
            assert answer_of(gathered([*events[:count], *rest[1:]])) == answer_of(whole)
            heard = events[count]
            if isinstance(heard, Chunk):
                position += len(heard.tokens)
                for token in heard.tokens:
                    known = extend_hash(known, token)


def answer_of(done: Completion) -> tuple[object, ...]:
    return done.text, done.content, done.reasoning, done.tool_calls, done.finish_reason


def test_over_grpc_the_talk_goes_on_with_calls_and_results(tiny_door: Front) -> None:
    with called(tiny_door) as (_, client):
        first = client.chat(TALK, tools=TOOLS, choices=[WRITTEN["hermes"]], max_tokens=300)
        results = [{"role": "tool", "tool_call_id": call.id, "content": "23"} for call in first.tool_calls]
        broken = {"id": "b", "type": "function", "function": {"name": "now", "arguments": '{"a": '}}
        cut = {"role": "assistant", "content": None, "tool_calls": [broken]}
        results.append({"role": "tool", "tool_call_id": "b", "content": "no"})
        talk = [*TALK, first.answer, cut, *results]
        second = client.chat(talk, tools=TOOLS, max_tokens=3, echo=True)
        assert second.prompt is not None
        call = '<tool_call>{"name": "weather", "arguments": {"city": "Köln", "unit": "C"}}</tool_call>'
        assert f"assistant: Well.{call}" in second.prompt.text
        assert r'{"name": "now", "arguments": {"arguments": "{\"a\": "}}' in second.prompt.text
        assert second.prompt.text.endswith("tool: 23tool: 23tool: noassistant: ")
        last = [*TALK, {"role": "assistant", "content": "It is "}]
        goes_on = client.complete(Chat(last, continue_final_message=True), max_tokens=3, echo=True)
        assert goes_on.prompt is not None
        assert goes_on.prompt.text.endswith("assistant: It is ")


def test_the_template_is_told_more(tiny_door: Front) -> None:
    template = "{{ mood }}{% for m in messages %}{{ m.name }}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
    message = {"role": "assistant", "name": "Ada", "reasoning_content": "Hm.", "content": "Hello"}
    with called(tiny_door, template) as (_, client):
        done = client.complete(Chat([message], template_values={"mood": "glad "}), max_tokens=1, echo=True)
    assert done.prompt is not None
    assert done.prompt.text == "glad AdaHm.Hello"


def test_several_answers_to_one_chat(tiny_door: Front) -> None:
    with called(tiny_door) as (door, client):
        asked: Any = {"temperature": 0.9, "seed": 3, "max_tokens": 300}
        chat = Chat(TALK, TOOLS, tool_choice="required", parallel_tool_calls=False)
        many = client.complete_many(chat, 3, **asked)
        request = generate_request(chat, **asked)
        request.n = 3
        told: dict[int, str] = {}
        with grpc.insecure_channel(door.serving.address) as channel:
            for each in generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=LIMIT_S):
                part = each.chunk if each.HasField("chunk") else each.finished
                for call in part.delta.tool_calls:
                    told[each.choice] = told.get(each.choice, "") + call.name + call.arguments
    for index, done in enumerate(many):
        checked_completion(done)
        assert told[index] == "".join(call.name + call.arguments for call in done.tool_calls)


def test_a_request_id_stands_for_one_chat(tiny_door: Front) -> None:
    with called(tiny_door) as (_, client):
        asked: Any = {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 100, "request_id": "once"}
        first, again = client.chat(TALK, **asked), client.chat(TALK, **asked)
        assert answer_of(first) == answer_of(again)
        with pytest.raises(SpecwireError, match="ALREADY_EXISTS"):
            client.chat(TALK, **{**asked, "tool_choice": "required"})
    one, other = (generate_request(Chat(TALK, TOOLS, tool_choice=each)) for each in ("auto", "required"))
    assert digest_of(one) != digest_of(other)


def test_refusals_name_their_field(tiny_door: Front) -> None:
    strict = [{"type": "function", "function": {**each["function"], "strict": True}} for each in TOOLS]
    odd = {"type": "function", "function": {"name": "a", "parameters": {"properties": {"x": {"type": "frob"}}}}}
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (Chat([{"role": "frob", "content": "x"}]), {}, "messages: messages[0].role must be one of"),
        (Chat(TALK, strict), {"json_schema": {"type": "object"}}, "json_schema: contradicts tools that a grammar"),
        (Chat(TALK, [odd], tool_choice="required"), {}, "tools: "),
        (Chat(TALK * 400), {}, "messages: "),
    ]
    with called(tiny_door) as (_, client), called(tiny_door, "") as (_, without):
        for chat, options, message in wrong:
            with pytest.raises(SpecwireError, match=f"INVALID_ARGUMENT.*{re.escape(message)}"):
                client.complete(chat, **options)
        with pytest.raises(SpecwireError, match="INVALID_ARGUMENT.*has no chat template"):
            without.chat(TALK)


USER = [pb.ChatMessage(role="user", content="x")]
TOOL = [pb.ChatTool(name="f", parameters='{"type": "object"}')]


def described(parameters: str) -> pb.Chat:
    return pb.Chat(messages=USER, tools=[pb.ChatTool(name="f", parameters=parameters)])


AUTO = pb.TOOL_CHOICE_AUTO
MISTAKEN: list[tuple[pb.Chat, str]] = [
    (pb.Chat(), "messages: must be a list of at least one message"),
    (pb.Chat(messages=USER * 4097), "messages: at most 4096 are allowed, not 4097"),
    (pb.Chat(messages=USER, tools=TOOL * 2), "tools: tools[1].name: 'f' stands there twice"),
    (pb.Chat(messages=USER, tools=TOOL * 129), "tools: at most 128 are allowed, not 129"),
    (described("[]"), "tools: tools[0].parameters must be a JSON"),
    (described('{"a": NaN}'), "tools: tools[0].parameters must be"),
    (described('{"a": [' + '"",' * MOST_PARTS + '""]}'), f"tools[0].parameters has more than {MOST_PARTS} strings"),
    (described('{"a": "' + "x" * MOST_JSON_BYTES + '"}'), f"have more than {MOST_JSON_BYTES} bytes"),
    (pb.Chat(messages=USER, template_values="5"), "template_values: must be a JSON object, not '5'"),
    (pb.Chat(messages=USER, tool_name="g", tools=TOOL), "tool_name: 'g' is none of the tools"),
    (pb.Chat(messages=USER, tool_name="f", tools=TOOL, tool_choice=AUTO), "tool_name: contradicts tool_choice"),
]


@pytest.mark.parametrize(("chat", "message"), MISTAKEN)
def test_what_is_mistaken(chat: pb.Chat, message: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        talk_of(chat)
    assert message in str(caught.value)


def test_what_this_program_does_not_know_is_refused() -> None:
    unknown = b"\xf8\x07\x01"  # a number in field 127
    known = pb.Chat(messages=USER, tools=TOOL)
    other_choice = pb.Chat.FromString(known.SerializeToString() + b"\x18\x09")
    wrong = [pb.Chat.FromString(known.SerializeToString() + unknown), other_choice]
    for part in (known.messages[0], known.tools[0]):
        other = type(part).FromString(part.SerializeToString() + unknown)
        wrong.append(
            pb.Chat(messages=[other]) if isinstance(other, pb.ChatMessage) else pb.Chat(messages=USER, tools=[other])
        )
    for chat in wrong:
        with pytest.raises(InvalidParameter, match="does not know|not a known value"):
            talk_of(chat)


def test_the_form_of_an_answer_is_kept_as_text() -> None:
    form = AnswerForm("qwen3_coder", (ToolFunction("f", {"type": "object"}),), None)
    assert AnswerForm.read(str(form)) == form
    for text in ("", "{", "[]", "5", "{}", '{"form": "frob", "functions": [], "thinking": null}', '{"form": "json"}'):
        assert AnswerForm.read(text) is None


# ----------------------------------------------------------------------------------------------------------------------
# A template that opens the model's thought: it is free, told apart, and the answer behind it has the form wanted.

ASKED: Any = [{"role": "user", "content": "a thing, please"}]
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
def thinking(known: Front, request: pytest.FixtureRequest) -> Iterator[Front]:
    with another(known, chat_template=request.param) as running:
        yield running


@pytest.mark.parametrize("form", FORMS)
def test_the_form_begins_behind_the_thought(thinking: Front, form: str) -> None:
    more, fits = FORMS[form]
    asked: dict[str, Any] = {"messages": ASKED, "temperature": 0, "max_tokens": 100, **more}
    choice = thinking.done(CHAT, **asked)["choices"][0]
    message = choice["message"]
    assert (choice["finish_reason"], message["reasoning_content"]) == ("stop", THOUGHT.strip())
    assert fits(message["content"])
    deltas = [event["choices"][0]["delta"] for event in thinking.events(CHAT, **asked) if event["choices"]]
    for field in ("content", "reasoning_content"):
        assert "".join(each.get(field) or "" for each in deltas) == message[field]


def test_the_official_client_parses_it(thinking: Front) -> None:
    with client_of(thinking) as client:
        done = client.chat.completions.parse(
            model=thinking.model, messages=ASKED, response_format=Thing, temperature=0, max_completion_tokens=100
        )
        assert isinstance(done.choices[0].message.parsed, Thing)
        response = client.responses.parse(
            model=thinking.model, input="a thing, please", text_format=Thing, temperature=0, max_output_tokens=100
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


def test_over_grpc_likewise(thinking: Front) -> None:
    with Client(thinking.serving.address, patience=0.0) as client:
        for more in ({"json_schema": SCHEMA}, {"regex": "yes|no"}, {"choices": ["yes"]}, {"grammar": 'start: "yes"'}):
            done = client.chat(ASKED, max_tokens=100, **more)
            assert (done.finish_reason, done.reasoning) == (FinishReason.EOS, THOUGHT.strip())
            assert is_thing(done.content) if "json_schema" in more else done.content in ("yes", "no")


def test_forced_calls_likewise(thinking: Front) -> None:
    asked: dict[str, Any] = {"messages": ASKED, "tools": TOOLS, "tool_choice": "required", "max_tokens": 300}
    choice = thinking.done(CHAT, temperature=0, parallel_tool_calls=False, **asked)["choices"][0]
    assert (choice["finish_reason"], choice["message"]["reasoning_content"]) == ("tool_calls", THOUGHT.strip())
    with client_of(thinking) as client:
        done = client.chat.completions.create(model=thinking.model, temperature=0, parallel_tool_calls=False, **asked)
    (call,) = done.choices[0].message.tool_calls or []
    checked(call.function.name, call.function.arguments)


def test_a_thought_that_is_cut_is_no_answer(thinking: Front) -> None:
    choice = thinking.done(CHAT, messages=ASKED, temperature=0, max_tokens=3, response_format=FORMAT)["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")


def test_where_the_template_opens_none_the_form_is_all(known: Front) -> None:
    """A user's message that looks like an opened thought opens none."""
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "response_format": FORMAT}
    for template in (HERMES, HERMES + "{# <think> #}", HERMES + "<think>\n\n</think>\n\n"):
        with another(known, chat_template=template) as thinking:
            choice = thinking.done(CHAT, messages=[{"role": "user", "content": "x<think>"}], **asked)["choices"][0]
            assert choice["finish_reason"] == "stop"
            assert is_thing(choice["message"]["content"])
            assert "reasoning_content" not in choice["message"]
