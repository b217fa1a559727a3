"""Chats as OpenAI's API writes them, on the wire; what that cannot carry is refused by name before it is sent."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from specwire.client import Chat, SpecwireError
from specwire.client.requests import chat_to_wire, generate_request
from specwire.v1 import generation_pb2 as pb

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
