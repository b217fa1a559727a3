"""/v1/responses with the official client, unmodified: created, streamed, followed, read again, with tools."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import jsonschema
import openai
import pytest

from orchestrator.http.openai.response_items import OutputItems
from orchestrator.http.openai.responses import ResponseAnswer, ResponseNote
from orchestrator.tenants import Access
from specwire.rpc.keys import Keys
from specwire.text.tool_calls.formats import FORMATS
from specwire.text.tool_calls.parser import OutputParser
from specwire.text.tool_calls.readers import ToolFunction
from tests.orchestrator.http.front import HERMES, MODEL, RESPONSES, WORDS, Front, another, client_of
from tests.orchestrator.http.test_tools import WEATHER
from tests.orchestrator.stack import PROMPT, TARGET, held, plain
from tests.wait import asked_blocking

GREEDY = {"ignore_eos": True}
LENGTH = 20
OUT_OF_ORDER = "the verifier is out of order"
TOKENS = plain(TARGET, PROMPT, LENGTH)
WHOLE = " ".join(map(str, TOKENS))
STOPPED = {**GREEDY, "stop": [f" {plain(TARGET, PROMPT, LENGTH + 1)[-1]}"]}


@pytest.fixture
def client(door: Front) -> Iterator[openai.OpenAI]:
    with client_of(door) as found:
        yield found


ADA, BOB = "the-secret-of-tenant-ada", "the-secret-of-tenant-bob"


@contextmanager
def guarded(door: Front, tokens_per_minute: int | None = None) -> Iterator[tuple[Front, openai.OpenAI, openai.OpenAI]]:
    """An orchestrator that asks for keys; Ada's client and Bob's."""
    access = Access(keys=Keys({ADA: "ada", BOB: "bob"}), tokens_per_minute=tokens_per_minute)
    with another(door, access=access) as running, client_of(running, ADA) as ada, client_of(running, BOB) as bob:
        yield running, ada, bob


def created(client: openai.OpenAI, given: Any = WORDS, **more: Any) -> Any:
    wish = {"model": MODEL, "max_output_tokens": LENGTH, "temperature": 0, "extra_body": GREEDY, **more}
    return client.responses.create(input=given, **wish)


def test_created_and_read_again(client: openai.OpenAI) -> None:
    done = created(client, metadata={"for": "a test"}, instructions=None)
    assert done.output_text == WHOLE
    assert (done.status, done.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (done.usage.input_tokens, done.usage.output_tokens, done.usage.total_tokens) == (3, LENGTH, 3 + LENGTH)
    assert (done.model, done.metadata, done.temperature) == (MODEL, {"for": "a test"}, 0)
    again = client.responses.retrieve(done.id)
    assert again == done
    assert created(client, extra_body={**GREEDY, "presence_penalty": 2}).output_text != done.output_text
    stopped = created(client, extra_body={**GREEDY, "stop": [f" {TOKENS[5]}"]})
    assert (stopped.status, stopped.output_text) == ("completed", " ".join(map(str, TOKENS[:5])))
    assert client.responses.retrieve(stopped.id) == stopped


# What each response has: those that Open Responses (2026-04-24) requires.
REQUIRED = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata"),
    *("safety_identifier", "prompt_cache_key"),
}


def test_a_response_has_what_open_responses_requires(door: Front) -> None:
    before = int(time.time())
    more = {"presence_penalty": 0.0, "max_tool_calls": 3, "safety_identifier": "a", "prompt_cache_key": "b"}
    told = door.done(RESPONSES, input=WORDS, max_output_tokens=40, temperature=0, **STOPPED, **more)
    assert told.keys() >= REQUIRED
    assert {name: told[name] for name in more} == more
    assert (told["frequency_penalty"], told["top_logprobs"], told["service_tier"]) == (0, 0, "default")
    assert told["status"] == "completed"
    assert before <= told["created_at"] <= told["completed_at"] <= time.time()
    cut = door.done(RESPONSES, input=WORDS, max_output_tokens=2, ignore_eos=True, truncation="auto")
    assert (cut["status"], cut["completed_at"], cut["truncation"]) == ("incomplete", None, "disabled")


def stored_end(door: Front, response: str) -> float:
    stored = door.loop.run(door.serving.orchestrator.store.read(response.removeprefix("resp_")))
    assert stored is not None
    assert stored.ended is not None
    return stored.ended


def test_a_stream_ends_as_open_responses_has_it(door: Front) -> None:
    """The last event is [DONE]; `event` names each one's type."""
    answer = door.post(RESPONSES, input=WORDS, max_output_tokens=4, stream=True)
    events = [event.split("\n") for event in answer.text.rstrip().split("\n\n")]
    assert events.pop() == ["data: [DONE]"]
    for name, data in events:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_a_stream_that_fails_tells_the_error_and_the_response(door: Front) -> None:
    """Nothing came behind an `error`, and that was no event of Open Responses, nor one that the client raises."""
    with held(2) as let_go:
        wish = {"input": WORDS, "max_output_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
        with door.client.stream("POST", RESPONSES, json=wish) as answer:
            lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))
            session = json.loads(next(lines))["response"]["id"].removeprefix("resp_")
            door.loop.run(broken(door, session))
            let_go(1000)
            *events, done = list(lines)
    told = [event for event in map(json.loads, events) if event["type"] in ("error", "response.failed")]
    error, last = told
    assert (done, error["message"], error["error"]["message"]) == ("[DONE]", OUT_OF_ORDER, OUT_OF_ORDER)
    assert (error["error"]["type"], error["error"]["code"]) == ("server_error", "unavailable")
    response = last["response"]
    assert (response["status"], response["error"]["message"], response["completed_at"]) == (
        "failed",
        OUT_OF_ORDER,
        None,
    )
    assert [item["status"] for item in response["output"]] in ([], ["incomplete"])


async def broken(door: Front, session_id: str) -> None:
    door.serving.orchestrator.sessions[session_id].fail(grpc.StatusCode.UNAVAILABLE, OUT_OF_ORDER)


# Clients of OpenAI's Responses API send these, and a response is what it is without them.
CODEX: dict[str, Any] = {
    "store": False,
    "parallel_tool_calls": True,
    "reasoning": {"effort": "low", "generate_summary": "auto", "context": "auto", "mode": "standard"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a2",
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
    "client_metadata": {"x-codex-installation-id": "fa03", "turn": "1"},
    "text": {"verbosity": "low"},
    "tools": [
        {"type": "local_shell"},
        {"type": "web_search", "external_web_access": False},
        {"type": "image_generation", "output_format": "png"},
        {
            "type": "custom",
            "name": "apply_patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start:"},
        },
    ],
    "tool_choice": "auto",
}


def test_what_changes_no_answer_is_taken(door: Front) -> None:
    """Codex CLI sends nearly all of these."""
    told = door.done(RESPONSES, input=WORDS, max_output_tokens=LENGTH, temperature=0, ignore_eos=True, **CODEX)
    assert told["output"][0]["content"][0]["text"] == WHOLE
    assert told["tools"] == []  # of those that were available to the model
    assert told["reasoning"] == {"effort": "low", "summary": "auto"}
    assert told["text"] == {"format": {"type": "text"}, "verbosity": "low"}


def test_compaction_is_no_response(door: Front) -> None:
    """It was 405, as if a response of that name could be read."""
    answer = door.post(f"{RESPONSES}/compact", model=MODEL, input=WORDS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_at_another_orchestrator_of_the_log_it_would_be_told_from_there(door: Front, client: openai.OpenAI) -> None:
    """What this one forgot is made of the log again; whose guesses were right is not in it."""
    for more in ({}, {"extra_body": {**GREEDY, "stop": [f" {TOKENS[5]}"]}}):
        done = created(client, **more)
        door.loop.run(forgotten(door, done.id.removeprefix("resp_")))
        again: Any = client.responses.retrieve(done.id)
        told = done.output, done.status, done.usage.output_tokens
        assert (again.output, again.status, again.usage.output_tokens) == told
        assert again.completed_at == (int(stored_end(door, done.id)) if more else None)


async def forgotten(door: Front, session_id: str) -> None:
    del door.serving.orchestrator.sessions[session_id]


def test_streamed_events(client: openai.OpenAI) -> None:
    """The client's own accumulator follows them; they are numbered, and each text is told once more at its end."""
    wish: dict[str, Any] = {"max_output_tokens": 40, "temperature": 0, "extra_body": STOPPED}
    with client.responses.stream(model=MODEL, input=WORDS, **wish) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == WHOLE
    assert next(event.text for event in events if event.type == "response.output_text.done") == WHOLE
    assert final.output_text == WHOLE
    assert client.responses.retrieve(final.id).output_text == WHOLE


def test_a_next_response_goes_on_behind_the_last(door: Front, client: openai.OpenAI) -> None:
    """As if the client had sent the whole conversation; instructions are those of each request alone."""
    first = created(client, instructions="1 2")
    second = created(client, "8 9", previous_response_id=first.id)
    third = created(client, "10", previous_response_id=second.id, instructions="3")
    for told, words in (
        (second, f"{WORDS} {first.output_text} 8 9"),
        (third, f"3 {WORDS} {first.output_text} 8 9 {second.output_text} 10"),
    ):
        tokens = [int(word) for word in words.split()]
        assert told.output_text == " ".join(map(str, plain(TARGET, tokens, LENGTH)))
        assert told.usage.input_tokens == len(tokens)
    assert second.previous_response_id == first.id
    whole = [
        {"role": "user", "content": WORDS},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": [{"type": "input_text", "text": "8 9"}]},
    ]
    assert created(client, whole).output_text == second.output_text
    items = [*whole[:1], *[item.model_dump(exclude_none=True) for item in first.output], whole[2]]
    assert created(client, items).output_text == second.output_text
    record = door.serving.orchestrator.sessions[second.id.removeprefix("resp_")].view.record
    assert record.parent == first.id.removeprefix("resp_")


def test_what_is_not_to_be_stored_is_gone(door: Front, client: openai.OpenAI) -> None:
    done = created(client, store=False)
    assert done.output_text == WHOLE
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(done.id)
    with pytest.raises(openai.NotFoundError) as caught:
        created(client, previous_response_id=done.id)
    assert caught.value.param == "previous_response_id"
    log = asked_blocking(lambda: door.loop.run(left(door, done.id)), lambda found: found is None)
    assert log is None


async def left(door: Front, response: str) -> object:
    try:
        return await door.serving.orchestrator.store.read(response.removeprefix("resp_"))
    except Exception as error:
        assert type(error).__name__ == "DeletedSession"  # noqa: PT017
        return None


def test_what_is_asked_of_a_stored_one(client: openai.OpenAI) -> None:
    done = created(client)
    known: Any = {"include": ["file_search_call.results", "reasoning.encrypted_content"], "stream": False}
    assert client.responses.retrieve(done.id, include_obfuscation=True, **known) == done
    refused: list[tuple[Any, str]] = [
        ({"include": ["message.output_text.logprobs", *known["include"]]}, "include"),
        ({"starting_after": 0}, "starting_after"),
        ({"stream": True}, "stream"),
    ]
    for asked, param in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.retrieve(done.id, **asked)
        assert caught.value.param == param


def test_it_may_be_private(door: Front, client: openai.OpenAI) -> None:
    done = created(client, extra_body={**GREEDY, "private": True})
    assert door.serving.orchestrator.sessions[done.id.removeprefix("resp_")].view.record.private


def test_deleted(client: openai.OpenAI) -> None:
    done = created(client)
    client.responses.delete(done.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(done.id)


def test_cancelled_while_it_runs(door: Front, client: openai.OpenAI) -> None:
    with held(2) as let_go:
        wish: dict[str, Any] = {"max_output_tokens": 400, "temperature": 0, "extra_body": GREEDY}
        with client.responses.create(model=MODEL, input=WORDS, stream=True, **wish) as stream:
            begun = next(iter(stream))
            assert begun.type == "response.created"
            found = begun.response.id
            assert client.responses.retrieve(found).status == "in_progress"
            let_go(4)
            assert client.responses.cancel(found).status == "cancelled"
            let_go(1000)
            kinds = [event.type for event in stream]
    assert kinds[-1] == "response.failed"
    told = client.responses.retrieve(found)
    assert told.status == "cancelled"
    assert WHOLE.startswith(told.output_text[: len(WHOLE)])
    assert client.responses.cancel(found) == told


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"background": True}, "background"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"truncation": "middle"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"tools": [{"type": "funktion"}]}, "tools"),
        ({"tools": ["function"]}, "tools"),
        ({"tools": [{"type": ["function"]}]}, "tools"),
        ({"tools": [{"type": "web_search"}] * 129}, "tools"),
        ({"tools": [{"type": "namespace", "name": "files", "tools": [{"name": "a"}] * 129}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "files", "tools": [{"type": "function"}]}]}, "tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"extra_body": {"messages": []}}, "messages"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"extra_body": {"reasoning": {"summary": "long"}}}, "reasoning.summary"),
        ({"extra_body": {"client_metadata": "x"}}, "client_metadata"),
        ({"given": [{"type": "image_generation_call", "id": "x", "result": None, "status": "completed"}]}, "input"),
        ({"given": []}, "input"),
        ({"given": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"given": [{"role": "critic", "content": "1"}]}, "input"),
        ({"given": "5 " * 5000}, "input"),
    ],
)
def test_what_is_not_served_is_refused_by_name(client: openai.OpenAI, more: dict[str, Any], param: str) -> None:
    asked = dict(more)
    with pytest.raises(openai.APIStatusError) as caught:
        created(client, asked.pop("given", WORDS), **asked)
    assert (caught.value.status_code, caught.value.param) == (404 if "previous" in param else 400, param)


def test_sessions_of_other_calls_are_no_responses(door: Front, client: openai.OpenAI) -> None:
    done = client.completions.create(model=MODEL, prompt=WORDS, max_tokens=3, temperature=0)
    session: Any = done.choices[0].model_extra or {}
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_" + session["specwire"]["session_id"])


def test_another_tenant_sees_nothing(door: Front) -> None:
    with guarded(door) as (_, one, other):
        done = created(one)
        assert one.responses.retrieve(done.id) == done
        for call in (other.responses.retrieve, other.responses.cancel, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                call(done.id)
        with pytest.raises(openai.NotFoundError):
            created(other, previous_response_id=done.id)


def test_reading_again_is_charged_by_its_size_and_done_beside_the_loop(
    door: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note of megabytes was read, walked and written on the event loop, and charged to nobody."""
    threads: set[str] = set()
    for kind, name in ((ResponseAnswer, "written"), (OutputItems, "take")):
        monkeypatch.setattr(kind, name, noting_thread(getattr(kind, name), threads))
    monkeypatch.setattr(ResponseNote, "read", staticmethod(noting_thread(ResponseNote.read, threads)))
    with guarded(door, tokens_per_minute=10**6) as (running, client, _):
        told = {"type": "reasoning", "summary": [], "content": "x" * (1 << 20)}
        done = created(client, [told, {"role": "user", "content": WORDS}])
        threads.clear()
        charged: list[int] = []
        allowances = running.serving.orchestrator._allowances
        monkeypatch.setattr(allowances, "charge", lambda tenant, tokens: charged.append(tokens))
        monkeypatch.setattr(running.serving.orchestrator.admission, "_charge", allowances.charge)
        assert client.responses.retrieve(done.id).output_text == WHOLE
        assert charged[0] == 1
        assert (1 << 20) // 1024 <= charged[1] < 2 * (1 << 20) // 1024
        assert threads == {"aside_0"}
        created(client, previous_response_id=done.id)
        assert len(charged) == 4


def noting_thread(work: Any, threads: set[str]) -> Any:
    def noted(*args: Any, **more: Any) -> Any:
        threads.add(threading.current_thread().name)
        return work(*args, **more)

    return noted


def test_a_tenant_without_tokens_reads_nothing_again(door: Front) -> None:
    with guarded(door, tokens_per_minute=30) as (_, client, _):
        done = created(client)
        with pytest.raises(openai.RateLimitError, match="30 tokens a minute are used up"):
            for _ in range(100):
                client.responses.retrieve(done.id)


def test_items_are_bounded_with_those_before_them(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="input: at most 8192 are allowed, not 8193"):
        created(client, [{"role": "user", "content": ""}] * 8193)


# ----------------------------------------------------------------------------------------------------------------------
# Tools and forms: calls as items, their outputs in the next response, malformed calls as text.

WISH: dict[str, Any] = {"max_output_tokens": 200, "extra_body": {"seed": 5}}
TOOLS: Any = [
    {"type": "function", "name": "weather", "description": "Of a city.", "parameters": WEATHER, "strict": True},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
SEEDED: dict[str, Any] = {"seed": 5, "max_output_tokens": 200}
NAMED: Any = {"type": "function", "name": "weather"}
QUESTION = "How warm is it?"


@pytest.fixture(scope="module")
def talking(tiny_door: Front) -> Iterator[Front]:
    with another(tiny_door, chat_template=HERMES) as door:
        yield door


@pytest.fixture
def tool_client(talking: Front) -> Iterator[openai.OpenAI]:
    with client_of(talking) as found:
        yield found


def ask(client: openai.OpenAI, given: Any = QUESTION, **more: Any) -> Any:
    return client.responses.create(model=client.models.list().data[0].id, input=given, **WISH, **more)


def prompt_of(door: Front, response: str) -> str:
    """What the session was begun with, as text."""
    orchestrator = door.serving.orchestrator
    record = orchestrator.sessions[response.removeprefix("resp_")].view.record
    tokenizer = orchestrator.pool.models.tokenizer_of(record)
    return str(tokenizer.decode(list(record.prompt), skip_special_tokens=False))


def test_a_call_and_what_came_of_it(talking: Front, tool_client: openai.OpenAI) -> None:
    """The next prompt is what the template makes of the whole conversation, the call and its output included."""
    asked = ask(tool_client, tools=TOOLS, tool_choice=NAMED)
    (call,) = asked.output
    assert (asked.status, call.type, call.name, call.status) == ("completed", "function_call", "weather", "completed")
    arguments = json.loads(call.arguments)
    jsonschema.validate(arguments, WEATHER)
    assert tool_client.responses.retrieve(asked.id).output == asked.output
    more: Any = {"tools": TOOLS, "tool_choice": NAMED, **WISH}
    with tool_client.responses.stream(model=asked.model, input=QUESTION, **more) as stream:
        *_, ended = (event for event in stream if event.type.startswith("response.function_call_arguments"))
        final: Any = stream.get_final_response()
    assert final.output[0].arguments == call.arguments == ended.arguments  # type: ignore[union-attr]
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "3 degrees"}]
    then = ask(tool_client, result, previous_response_id=asked.id)
    called = json.dumps(arguments, ensure_ascii=False)
    assert prompt_of(talking, then.id) == (
        f'user: {QUESTION}assistant: <tool_call>{{"name": "weather", "arguments": {called}}}</tool_call>'
        "tool: 3 degreesassistant: "
    )
    again = ask(tool_client, [{"role": "user", "content": QUESTION}, call.model_dump(exclude_none=True), *result])
    assert (again.output_text, again.usage.input_tokens) == (then.output_text, then.usage.input_tokens)


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


def test_functions_of_a_namespace(talking: Front, tool_client: openai.OpenAI) -> None:
    """The model calls them by one name; what is left out it does not see, and a response does not list it."""
    asked = ask(tool_client, tools=NAMESPACED, tool_choice=SKY)
    (call,) = asked.output
    assert (call.type, call.name, call.namespace) == ("function_call", "weather", "sky")
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    assert tool_client.responses.retrieve(asked.id) == asked
    assert [each.type for each in asked.tools] == ["function", "namespace"]
    assert [each.name for each in asked.tools[1].tools] == ["weather"]
    prompt = prompt_of(talking, asked.id)
    assert '"name": "sky__weather"' in prompt
    assert "web_search" not in prompt
    assert "draw" not in prompt
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3 degrees"}
    then = ask(tool_client, [{"role": "user", "content": QUESTION}, call.model_dump(exclude_none=True), result])
    assert '<tool_call>{"name": "sky__weather", "arguments": {' in prompt_of(talking, then.id)


def test_tools_are_repeated_in_the_schemas_form(talking: Front) -> None:
    told = talking.done(RESPONSES, input=QUESTION, tools=[{"type": "function", "name": "now"}])
    assert told["tools"] == [
        {"type": "function", "name": "now", "description": None, "parameters": None, "strict": False}
    ]
    assert '{"name": "now"}' in prompt_of(talking, told["id"])  # the template sees what was sent


def test_allowed_tools(talking: Front) -> None:
    """The prompt has all tools; a call is one of those that are allowed."""
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    tools = [TOOLS[0], {**TOOLS[1], "description": "The time."}]
    told = talking.done(RESPONSES, input=QUESTION, tools=tools, tool_choice=allowed, **SEEDED)
    assert {item["name"] for item in told["output"]} == {"weather"}
    assert told["tool_choice"] == allowed
    assert "The time." in prompt_of(talking, told["id"])
    for tools_of in ([], [{"type": "function", "name": "none"}], [{"type": "web_search"}]):
        wish = {"input": QUESTION, "tools": tools, "tool_choice": {**allowed, "tools": tools_of}}
        refused = talking.post(RESPONSES, **wish)
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
        told = door.done(RESPONSES, input=items, instructions="You are a sailor.", **SEEDED)
        text = f"system: You are a sailor.\n\nBe brief.\n\nBe kind.\nuser: {QUESTION}\n"
        assert prompt_of(door, told["id"]) == text
        late = door.post(RESPONSES, input=[*items, items[0]])
        assert (late.status_code, "only as the first" in late.text) == (400, True)


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
