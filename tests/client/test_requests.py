"""Requests and chats on the wire; what that cannot carry is refused by name before it is sent."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from specwire.client import Chat, SpecwireError
from specwire.client.requests import RequestOptions, chat_to_wire, generate_request, watch_request
from specwire.v1 import generation_pb2 as pb


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RequestOptions(max_tokens=-5), "max_tokens: must be from 0 to 4294967295, not -5"),
        (RequestOptions(top_k=-1), "top_k: must be from 0 to 4294967295, not -1"),
        (RequestOptions(seed=1 << 64), "seed: must be a whole number of 64 bits, not 18446744073709551616"),
        (RequestOptions(stop_ids=[3, -1]), "stop_ids: must be from 0 to 4294967295, not -1"),
        (RequestOptions(references="5 6"), "references: must be a list of texts"),
        (RequestOptions(references=[5, 6]), "references: must be a list of texts"),  # type: ignore[list-item]
        (RequestOptions(stop=["a", "\ud800"]), "stop: is not valid Unicode at index 0"),
        (RequestOptions(request_id="x\udc80"), "request_id: is not valid Unicode at index 1"),
    ],
)
def test_options_that_do_not_fit(options: RequestOptions, message: str) -> None:
    with pytest.raises(SpecwireError, match=f"INVALID_ARGUMENT: {message}"):
        generate_request("x", **options)


@pytest.mark.parametrize("prompt", [[-1], [1 << 32], "\udc80"])
def test_prompts_that_do_not_fit(prompt: str | list[int]) -> None:
    with pytest.raises(SpecwireError, match="INVALID_ARGUMENT: prompt: "):
        generate_request(prompt)


def test_watching_from_a_position_that_cannot_be() -> None:
    with pytest.raises(SpecwireError, match="from_position"):
        watch_request("s", -1, None)


def test_a_seed_is_sent_only_if_given() -> None:
    assert not generate_request("x").sampling.HasField("seed")
    assert generate_request("x", seed=0).sampling.HasField("seed")


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (RequestOptions(), pb.DRAFTING_AUTOMATIC),
        (RequestOptions(drafting=False), pb.DRAFTING_OFF),
        (RequestOptions(ngram=False), pb.DRAFTING_DRAFTERS),
        (RequestOptions(drafting=False, ngram=True), pb.DRAFTING_NGRAM),
    ],
)
def test_who_may_propose(options: RequestOptions, asked: pb.Drafting) -> None:
    assert generate_request("x", **options).drafting == asked


@pytest.mark.parametrize("named", [[], ["drafters"], ["ngram", "heads"], ["drafters", "ngram", "heads"]])
def test_which_sources_may_propose(named: list[str]) -> None:
    request = generate_request("x", sources=named)
    assert request.drafting == pb.DRAFTING_UNSPECIFIED
    assert request.HasField("sources")
    assert [field.name for field, _ in request.sources.ListFields()] == named
    assert not generate_request("x").HasField("sources")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RequestOptions(sources=["magic"]), r"must be a list of drafters, ngram, heads, not \['magic'\]"),
        (RequestOptions(sources="ngram"), "must be a list of drafters, ngram, heads, not 'ngram'"),
        (RequestOptions(sources=[], drafting=False), "contradicts drafting and ngram"),
        (RequestOptions(sources=["ngram"], ngram=True), "contradicts drafting and ngram"),
    ],
)
def test_sources_that_cannot_be_chosen(options: RequestOptions, message: str) -> None:
    with pytest.raises(SpecwireError, match=f"INVALID_ARGUMENT: sources: {message}"):
        generate_request("x", **options)


# ----------------------------------------------------------------------------------------------------------------------
# Chats, as OpenAI's API writes them.

USER = {"role": "user", "content": "How warm is it?"}
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city.", "parameters": {"type": "object"}, "strict": True},
}


def test_a_chat_on_the_wire() -> None:
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []}
    result = {"role": "tool", "tool_call_id": "a", "content": "23"}
    wire = chat_to_wire(Chat([USER, answer, result], [TOOL], template_values={"mood": "é"}))
    assert wire == pb.Chat(
        messages=[
            pb.ChatMessage(role="user", content="How warm is it?"),
            pb.ChatMessage(
                role="assistant", tool_calls=[pb.ToolCall(id="a", name="weather", arguments='{"city": "Köln"}')]
            ),
            pb.ChatMessage(role="tool", tool_call_id="a", content="23"),
        ],
        tools=[pb.ChatTool(name="weather", description="Of a city.", parameters='{"type": "object"}', strict=True)],
        tool_choice=pb.TOOL_CHOICE_AUTO,
        parallel_tool_calls=True,
        template_values='{"mood": "é"}',
    )
    assert generate_request(Chat([USER])).WhichOneof("prompt") == "chat"
    named = {"type": "function", "function": {"name": "weather"}}
    assert chat_to_wire(Chat([USER], [TOOL], tool_choice=named)).tool_name == "weather"
    assert chat_to_wire(Chat([USER], [TOOL], tool_choice="required")).tool_choice == pb.TOOL_CHOICE_REQUIRED


ODD: list[tuple[Any, str]] = [
    (Chat([5]), "messages[0]: must be an object, not 5"),  # type: ignore[list-item]
    (Chat([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content: must be a string"),
    (Chat([{**USER, "mood": "glad"}]), "messages[0].mood: is not carried"),
    (Chat([{**USER, "content": "\ud800"}]), "messages[0].content: is not valid Unicode at index 0"),
    (Chat([{"role": "assistant", "tool_calls": 5}]), "messages[0].tool_calls: must be a list, not 5"),
    (Chat([{"role": "assistant", "tool_calls": [5]}]), "messages[0].tool_calls[0]: must be an object"),
    (Chat([USER], [{"type": "custom"}]), "tools[0].type: must be 'function', not 'custom'"),
    (Chat([USER], [{"type": "function", "function": {"name": 5}}]), "tools[0].function.name: must be a string, not 5"),
    (
        Chat([USER], [{"type": "function", "function": {"name": "f", "parameters": {"a": float("nan")}}}]),
        "tools[0].function.parameters: is no JSON",
    ),
    (Chat([USER], tool_choice="any"), "tool_choice: must be none, auto, required or a function by name, not 'any'"),
    (Chat([USER], template_values={"a": {5}}), "template_values: is no JSON"),
]


@pytest.mark.parametrize(("chat", "message"), ODD)
def test_what_the_wire_cannot_carry(chat: Chat, message: str) -> None:
    with pytest.raises(SpecwireError) as refused:
        chat_to_wire(chat)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.message.startswith(message)
