"""A conversation as a prompt, written as OpenAI's API has it. Only what the wire cannot carry is refused here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specwire.client.errors import invalid
from specwire.v1 import generation_pb2 as pb

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

CHOICES = {
    "auto": pb.TOOL_CHOICE_AUTO,
    "none": pb.TOOL_CHOICE_NONE,
    "required": pb.TOOL_CHOICE_REQUIRED,
}
# What a message may say.
TEXTS = ("role", "content", "tool_call_id", "name", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt that the model's chat template writes.

    Attributes:
        messages: {"role", "content"}, of assistants also "tool_calls", of tools "tool_call_id". `Completion.answer` is
            one.
        tools: {"type": "function", "function": {"name", "description", "parameters", "strict"}}.
        tool_choice: auto, none, required, or {"type": "function", "function": {"name"}}.
        parallel_tool_calls: the answer may have several calls.
        continue_final_message: the answer goes on with the last message.
        template_values: more for the template, such as {"enable_thinking": False}.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    continue_final_message: bool = False
    template_values: Mapping[str, object] = field(default_factory=dict)


def chat_to_wire(chat: Chat) -> pb.Chat:
    """Raises SpecwireError (INVALID_ARGUMENT), naming field and value."""
    wire = pb.Chat(
        messages=[_message(f"messages[{index}]", each) for index, each in enumerate(chat.messages)],
        tools=[_tool(f"tools[{index}]", each) for index, each in enumerate(chat.tools)],
        parallel_tool_calls=chat.parallel_tool_calls,
        continue_final_message=chat.continue_final_message,
        template_values=_json("template_values", chat.template_values) if chat.template_values else "",
    )
    match chat.tool_choice:
        case str(choice) if choice in CHOICES:
            wire.tool_choice = CHOICES[choice]
        case {"type": "function", "function": {"name": str(name)}}:
            wire.tool_name = _text("tool_choice", name)
        case _:
            message = f"must be none, auto, required or a function by name, not {chat.tool_choice!r:.80}"
            raise invalid("tool_choice", message)
    return wire


def _message(path: str, message: Message) -> pb.ChatMessage:
    said = _said(path, message, (*TEXTS, "tool_calls"))
    calls = said.pop("tool_calls", [])
    if not isinstance(calls, list | tuple):
        raise invalid(f"{path}.tool_calls", f"must be a list, not {calls!r:.80}")
    made = [_call(f"{path}.tool_calls[{index}]", each) for index, each in enumerate(calls)]
    return pb.ChatMessage(**{name: _text(f"{path}.{name}", text) for name, text in said.items()}, tool_calls=made)


def _call(path: str, call: Mapping[str, Any]) -> pb.ToolCall:
    said = _said(path, call, ("id", "type", "function"))
    function = _said(f"{path}.function", said.get("function", {}), ("name", "arguments"))
    arguments = function.get("arguments", "")
    return pb.ToolCall(
        id=_text(f"{path}.id", said.get("id", "")),
        name=_text(f"{path}.function.name", function.get("name", "")),
        arguments=arguments if isinstance(arguments, str) else _json(f"{path}.function.arguments", arguments),
    )


def _tool(path: str, tool: Tool) -> pb.ChatTool:
    said = _said(path, tool, ("type", "function"))
    if said.get("type") != "function":
        raise invalid(f"{path}.type", f"must be 'function', not {said.get('type')!r:.80}")
    function = _said(f"{path}.function", said.get("function", {}), ("name", "description", "parameters", "strict"))
    parameters = function.get("parameters")
    return pb.ChatTool(
        name=_text(f"{path}.function.name", function.get("name", "")),
        description=_text(f"{path}.function.description", function.get("description", "")),
        parameters="" if parameters is None else _json(f"{path}.function.parameters", parameters),
        strict=bool(function.get("strict", False)),
    )


def _said(path: str, given: object, names: Sequence[str]) -> dict[str, Any]:
    """What is neither null nor an empty list of an object that may have these members."""
    if not isinstance(given, Mapping):
        raise invalid(path, f"must be an object, not {given!r:.80}")
    said = {name: value for name, value in given.items() if value is not None and value != []}
    for name in said:
        if name not in names:
            raise invalid(f"{path}.{name}", "is not carried: over HTTP a template may have it")
    return said


def _json(path: str, value: object) -> str:
    try:
        return _text(path, json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise invalid(path, f"is no JSON: {error}") from None


def _text(path: str, value: object) -> str:
    if not isinstance(value, str):
        raise invalid(path, f"must be a string, not {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(path, f"is not valid Unicode at index {error.start}") from error
    return value
