"""A chat over gRPC: as the fields that HTTP's callers send, so that both are checked alike."""

from __future__ import annotations

import json
from typing import Any

from orchestrator.admission import MOST_JSON_BYTES, MOST_MESSAGES, MOST_TOOLS
from orchestrator.chat.fields import Fields, JsonBounds, no_number, shown
from orchestrator.chat.talk import Talk, check_count, take_talk
from specwire.core.invalid import InvalidParameter
from specwire.rpc.convert import check_known
from specwire.v1 import generation_pb2 as pb

CHOICES = {
    pb.TOOL_CHOICE_UNSPECIFIED: None,
    pb.TOOL_CHOICE_AUTO: "auto",
    pb.TOOL_CHOICE_NONE: "none",
    pb.TOOL_CHOICE_REQUIRED: "required",
}


def talk_of(chat: pb.Chat) -> Talk:
    """InvalidParameter names the field."""
    check_known(chat, "chat")
    check_count("messages", len(chat.messages), MOST_MESSAGES)
    check_count("tools", len(chat.tools), MOST_TOOLS)
    values = JsonValues()
    body = {
        "messages": [_message(f"messages[{index}]", each) for index, each in enumerate(chat.messages)],
        "tools": [_tool(f"tools[{index}]", each, values) for index, each in enumerate(chat.tools)],
        "tool_choice": _choice(chat),
        "parallel_tool_calls": chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else None,
        "continue_final_message": chat.continue_final_message,
        "chat_template_kwargs": values.object("template_values", "", chat.template_values),
    }
    try:
        return take_talk(Fields(body), values.bounds)
    except InvalidParameter as error:  # there, a call and a tool have their function's fields within another object
        message = str(error).removeprefix(f"{error.field}: ").replace(".function.", ".")
        raise InvalidParameter(error.field, message) from None


class JsonValues:
    """JSON in strings of one request. bounds: of all of it."""

    def __init__(self) -> None:
        self.bounds = JsonBounds()
        self._bytes = 0

    def object(self, field: str, name: str, text: str) -> dict[str, Any] | None:
        """None for an empty text. name: of what is within the field, for errors."""
        if not text:
            return None
        data = text.encode()
        self._bytes += len(data)
        if self._bytes > MOST_JSON_BYTES:
            raise InvalidParameter(field, f"tools and template_values have more than {MOST_JSON_BYTES} bytes of JSON")
        self.bounds.check(data, field, name)
        try:
            found: object = json.loads(text, parse_constant=no_number)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            message = f"must be a JSON object, not {shown(text)}"
            raise InvalidParameter(field, f"{name} {message}" if name else message)
        return found


def _message(name: str, message: pb.ChatMessage) -> dict[str, Any]:
    """What is empty was not said, but the content."""
    check_known(message, name)
    said = {"name": message.name, "reasoning_content": message.reasoning_content, "tool_call_id": message.tool_call_id}
    calls = [_call(f"{name}.tool_calls[{index}]", each) for index, each in enumerate(message.tool_calls)]
    told = {"role": message.role, "content": message.content, **{key: text for key, text in said.items() if text}}
    return {**told, "tool_calls": calls} if calls else told


def _call(name: str, call: pb.ToolCall) -> dict[str, Any]:
    check_known(call, name)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _tool(name: str, tool: pb.ChatTool, values: JsonValues) -> dict[str, Any]:
    check_known(tool, name)
    parameters = values.object("tools", f"{name}.parameters", tool.parameters)
    said = {"description": tool.description or None, "parameters": parameters, "strict": tool.strict or None}
    function = {"name": tool.name, **{key: value for key, value in said.items() if value is not None}}
    return {"type": "function", "function": function}


def _choice(chat: pb.Chat) -> object:
    if chat.tool_choice not in CHOICES:
        raise InvalidParameter("tool_choice", f"{chat.tool_choice} is not a known value")
    if not chat.tool_name:
        return CHOICES[chat.tool_choice]
    if chat.tool_choice != pb.TOOL_CHOICE_UNSPECIFIED:
        raise InvalidParameter("tool_name", "contradicts tool_choice: give one of the two")
    if chat.tool_name not in [each.name for each in chat.tools]:
        raise InvalidParameter("tool_name", f"{shown(chat.tool_name)} is none of the tools")
    return {"type": "function", "function": {"name": chat.tool_name}}
