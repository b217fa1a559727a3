"""Chats over gRPC: the answer that HTTP gives, as it comes, told again from anywhere; what is wrong, by field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import jsonschema
import pytest

from orchestrator.admission import MOST_JSON_BYTES
from orchestrator.api.requests import digest_of
from orchestrator.chat.answer import AnswerForm, call_id
from orchestrator.chat.wire import talk_of
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
from tests.orchestrator.http.front import CHAT, LIMIT_S, Front, another, front
from tests.orchestrator.http.test_tools import BROKEN, CALLS, HERMES, TALK, TOOLS, WEATHER, WRITTEN
from tests.orchestrator.tiny import tiny

NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def tiny_door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("tiny")
    target = tiny(folder / "target", 1)
    with front(target, tiny(folder / "draft", 2, like=target, noise=0.01)) as running:
        yield running


@contextmanager
def called(known: Front, template: str = HERMES, form: str = "") -> Iterator[tuple[Front, Client]]:
    """An orchestrator with both doors, and a client of gRPC's."""
    with (
        another(known, chat_template=template, tool_format=form) as door,
        Client(door.serving.address, patience=0.0) as client,
    ):
        yield door, client


def checked(done: Completion) -> None:
    assert (done.content, done.reasoning) == ("", "")
    assert done.tool_calls
    for index, call in enumerate(done.tool_calls):
        assert call.id == call_id(done.session_id, index)
        arguments = json.loads(call.arguments)
        if call.name == "weather":
            jsonschema.validate(arguments, WEATHER)
        else:
            assert (call.name, arguments) == ("now", {})


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_forced_calls_whoever_drafts(tiny_door: Front, form: str) -> None:
    with called(tiny_door, form=form) as (_, client):
        for choice in ("required", NAMED):
            asked: Any = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
            asked |= {"max_tokens": 300, "temperature": 0.8, "seed": 5}
            plain = client.chat(TALK, **asked, drafting=False)
            drafted = client.chat(TALK, **asked)
            checked(plain)
            assert plain.text == drafted.text
            assert [each.arguments for each in plain.tool_calls] == [each.arguments for each in drafted.tool_calls]


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_what_a_model_writes_is_told_as_over_http(tiny_door: Front, form: str) -> None:
    text = WRITTEN[form]
    with called(tiny_door, form=form) as (door, client):
        over_http = door.done(CHAT, messages=TALK, tools=TOOLS, guided_choice=[text], max_tokens=300)["choices"][0]
        done = client.chat(TALK, tools=TOOLS, choices=[text], max_tokens=300)
    assert done.text == text
    assert done.content == (over_http["message"]["content"] or "")
    assert [(each.name, json.loads(each.arguments)) for each in done.tool_calls] == CALLS
    theirs = [each["function"] for each in over_http["message"]["tool_calls"]]
    assert [{"name": each.name, "arguments": each.arguments} for each in done.tool_calls] == theirs


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


def test_what_is_no_call_is_content(tiny_door: Front) -> None:
    with called(tiny_door) as (_, client):
        events = list(client.generate(Chat(TALK, TOOLS), choices=[BROKEN], max_tokens=300))
        ends = [
            each.whole
            for event in events
            if isinstance(event, Chunk | Finished) and event.delta
            for each in event.delta.tool_calls
        ]
        done = gathered(events)
        assert (done.content, done.tool_calls, set(ends)) == (BROKEN, (), {None, False})
        off = client.chat(TALK, tools=TOOLS, tool_choice="none", choices=[WRITTEN["hermes"]], max_tokens=300)
        assert (off.content, off.tool_calls) == (WRITTEN["hermes"], ())
        cut = client.chat(TALK, tools=TOOLS, choices=[WRITTEN["hermes"]], max_tokens=12)
        assert (cut.finish_reason, cut.tool_calls, cut.content) == (FinishReason.LENGTH, (), cut.text)
        plain = client.complete("How warm is it?", max_tokens=3)
        assert (plain.content, plain.tool_calls) == ("", ())


def test_the_talk_goes_on_with_calls_and_results(tiny_door: Front) -> None:
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
        checked(done)
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
        (Chat([]), {}, "messages: must be a list of at least one message"),
        (Chat([{"role": "frob", "content": "x"}]), {}, "messages: messages[0].role must be one of"),
        (Chat(TALK, strict), {"json_schema": {"type": "object"}}, "json_schema: contradicts tools that a grammar"),
        (Chat(TALK, [odd], tool_choice="required"), {}, "tools: "),
        (Chat(TALK * 400), {}, "messages: "),
    ]
    with called(tiny_door) as (_, client):
        for chat, options, message in wrong:
            with pytest.raises(SpecwireError) as refused:
                client.complete(chat, **options)
            assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
            assert refused.value.message.startswith(message)
    with called(tiny_door, "") as (_, client), pytest.raises(SpecwireError) as refused:
        client.chat(TALK)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "has no chat template" in refused.value.message


def call(arguments: str) -> list[pb.ChatMessage]:
    calls = [pb.ToolCall(id="a", name="f", arguments=arguments)]
    return [pb.ChatMessage(role="user", content="x"), pb.ChatMessage(role="assistant", tool_calls=calls)]


USER = [pb.ChatMessage(role="user", content="x")]
TOOL = [pb.ChatTool(name="f", parameters='{"type": "object"}')]
MISTAKEN: list[tuple[pb.Chat, str]] = [
    (pb.Chat(), "messages: must be a list of at least one message"),
    (pb.Chat(messages=USER * 4097), "messages: at most 4096 are allowed, not 4097"),
    (pb.Chat(messages=[pb.ChatMessage(role="")]), "messages: messages[0].role must be one of"),
    (pb.Chat(messages=call('{"a": ' * 129)), "messages: messages[1].tool_calls[0].arguments is nested too deeply"),
    (
        pb.Chat(messages=[pb.ChatMessage(role="user", tool_calls=[pb.ToolCall(name="f")])]),
        "is for assistants, not user",
    ),
    (pb.Chat(messages=USER, tools=TOOL * 2), "tools: tools[1].name: 'f' stands there twice"),
    (pb.Chat(messages=USER, tools=TOOL * 129), "tools: at most 128 are allowed, not 129"),
    (pb.Chat(messages=USER, tools=[pb.ChatTool(name="a b")]), "tools: tools[0].name must be 1 to 128 letters"),
    (
        pb.Chat(messages=USER, tools=[pb.ChatTool(name="f", parameters="[]")]),
        "tools: tools[0].parameters must be a JSON",
    ),
    (
        pb.Chat(messages=USER, tools=[pb.ChatTool(name="f", parameters='{"a": NaN}')]),
        "tools: tools[0].parameters must be",
    ),
    (pb.Chat(messages=USER, tools=[pb.ChatTool(name="f", parameters='{"type": 5}')]), "the JSON schema of an object"),
    (
        pb.Chat(messages=USER, tools=[pb.ChatTool(name="f", parameters='{"a": [' + '"",' * MOST_PARTS + '""]}')]),
        f"tools: tools[0].parameters has more than {MOST_PARTS} strings",
    ),
    (
        pb.Chat(messages=USER, tools=[pb.ChatTool(name="f", parameters='{"a": "' + "x" * MOST_JSON_BYTES + '"}')]),
        f"tools: tools and template_values have more than {MOST_JSON_BYTES} bytes",
    ),
    (pb.Chat(messages=USER, template_values="5"), "template_values: must be a JSON object, not '5'"),
    (pb.Chat(messages=USER, tool_choice=pb.TOOL_CHOICE_REQUIRED), "tool_choice: 'required' needs tools"),
    (pb.Chat(messages=USER, tool_name="g", tools=TOOL), "tool_name: 'g' is none of the tools"),
    (
        pb.Chat(messages=USER, tool_name="f", tools=TOOL, tool_choice=pb.TOOL_CHOICE_AUTO),
        "tool_name: contradicts tool_choice",
    ),
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
