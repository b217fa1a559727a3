"""Items of OpenAI's Responses API: those of a request become a chat's messages, a model's text becomes others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from orchestrator.admission import MOST_ITEMS, MOST_TOOLS
from orchestrator.chat.fields import check_count, shown
from orchestrator.chat.talk import text_of
from specwire.core.invalid import InvalidParameter
from specwire.text.tool_calls.parser import CallBegun, CallDelta, CallEnded, ContentDelta, OutputEvent, ReasoningDelta

Json = dict[str, Any]

# ----------------------------------------------------------------------------------------------------------------------
# From a request's items to messages.

# Roles of what may stand before a conversation.
BEGINNING = ("system", "developer")


def items_of(value: object) -> list[Json]:
    """`input` as a list of items. InvalidParameter: it is none."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if isinstance(value, list):
        check_count("input", len(value), MOST_ITEMS)
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        return list(value)
    raise InvalidParameter("input", f"must be a string or a list of items, not {shown(value)}")


def messages_of(items: Sequence[Json], instructions: str | None) -> list[Json]:
    """As a chat's request has them. InvalidParameter names the item that is not served."""
    messages: list[Json] = [] if instructions is None else [{"role": "system", "content": instructions}]
    for index, item in enumerate(items):
        path, kind = f"input[{index}]", item.get("type", "message")
        match kind:
            case "message":
                content = text_of(f"{path}.content", item.get("content"), "input")
                messages.append({"role": item.get("role"), "content": content})
            case "function_call":
                _add_call(messages, _call(path, item))
            case "function_call_output":
                output = text_of(f"{path}.output", item.get("output"), "input")
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            case "reasoning":
                pass  # templates leave the reasoning of earlier turns out
            case _:
                raise InvalidParameter("input", f"{path}.type: {shown(kind)} is not served")
    return _with_one_beginning(messages)


def _with_one_beginning(messages: list[Json]) -> list[Json]:
    """What stands before the conversation as one message: many templates refuse a second one.

    Clients send `instructions` beside a developer's message, and several of those.
    """
    leading = list(takewhile(lambda each: each["role"] in BEGINNING, messages))
    if len(leading) < 2:
        return messages
    text = "\n\n".join(each["content"] for each in leading if each["content"])
    return [{"role": "system", "content": text}, *messages[len(leading) :]]


def _call(path: str, item: Json) -> Json:
    for name in ("call_id", "name"):
        if not isinstance(item.get(name), str):
            raise InvalidParameter("input", f"{path}.{name} must be a string, not {shown(item.get(name))}")
    namespace = item.get("namespace")
    if not isinstance(namespace, str | None):
        raise InvalidParameter("input", f"{path}.namespace must be a string, not {shown(namespace)}")
    function = {"name": flat_name(namespace, item["name"]), "arguments": item.get("arguments")}
    return {"id": item["call_id"], "type": "function", "function": function}


def _add_call(messages: list[Json], call: Json) -> None:
    """Calls of one turn, and the text before them, are one message."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


# ----------------------------------------------------------------------------------------------------------------------
# The tools of a request. Functions are served, those of a namespace under its name and theirs.

# Types of tools that nobody here runs or reads calls of. As in llama.cpp's and vLLM's servers, the model is not told of
# them: it merely could have called one.
LEFT_OUT = frozenset(
    (
        *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search"),
        *("image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search", "web_search"),
        *("web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
    )
)


@dataclass(frozen=True, slots=True)
class ServedTools:
    """told: those that are served, as a response repeats them. chat: their functions, as a chat's request has them.

    left_out: a tool that is not, as an error names it; empty for none.
    """

    told: list[Json]
    chat: list[Json]
    left_out: str = ""

    def choice(self, value: object) -> object:
        """`tool_choice` as a chat's request has it. InvalidParameter: it could have been a tool that is left out."""
        if value == "required" and self.left_out:
            raise InvalidParameter("tool_choice", f"'required' may mean {self.left_out}, which is not served")
        match value:
            case {"type": "function"}:
                return _named(value)
            case {"type": "allowed_tools", "tools": list(allowed), **more}:
                mode = more.get("mode") or "auto"
                return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(map(_named, allowed))}}
        return value


def _named(value: object) -> object:
    """A function by name, as a chat's request has it; anything else as it is."""
    if not isinstance(value, dict) or value.get("type") != "function":
        return value
    return {"type": "function", "function": {"name": flat_name(value.get("namespace"), value.get("name"))}}


def served_tools(value: object) -> ServedTools:
    """InvalidParameter: a tool of no known type, or a malformed namespace; a chat's request checks the functions."""
    if not isinstance(value, list | None):
        raise InvalidParameter("tools", f"must be a list of tools, not {shown(value)}")
    check_count("tools", len(value or []), MOST_TOOLS)
    served: list[Json] = []
    left_out = ""
    for index, each in enumerate(value or []):
        kind = each.get("type") if isinstance(each, dict) else None
        if kind == "function":
            served.append(each)
        elif kind == "namespace":
            served.append(_namespace(f"tools[{index}]", each))
        elif isinstance(kind, str) and kind in LEFT_OUT:
            left_out = f"tools[{index}], a {kind}"
        else:
            raise InvalidParameter("tools", f"tools[{index}]: {shown(each)} is not served, functions are")
    chat = [_chat_tool(flat_name(namespace, each.get("name")), each) for namespace, each in functions_of(served)]
    return ServedTools([_told(each) for each in served], chat, left_out)


def _namespace(path: str, value: Json) -> Json:
    """With its functions alone."""
    name, tools = value.get("name"), value.get("tools")
    if not isinstance(name, str) or not isinstance(tools, list):
        raise InvalidParameter("tools", f"{path} must have a name and a list of tools")
    check_count("tools", len(tools), MOST_TOOLS)
    for each in tools:
        if not isinstance(each, dict) or not isinstance(each.get("name"), str):
            raise InvalidParameter("tools", f"{path}.tools must be objects with names, not {shown(each)}")
    return {**value, "tools": [each for each in tools if each.get("type") == "function"]}


def _chat_tool(name: object, function: Json) -> Json:
    return {"type": "function", "function": {**{k: v for k, v in function.items() if k != "type"}, "name": name}}


def _told(tool: Json) -> Json:
    """With what the API's schema requires."""
    if tool["type"] == "namespace":
        return {**tool, "tools": [_told(each) for each in tool["tools"]]}
    strict = tool.get("strict")
    return {"description": None, "parameters": None, **tool, "strict": False if strict is None else strict}


def functions_of(tools: Sequence[Json]) -> Iterator[tuple[str | None, Json]]:
    """Each function of served tools, with its namespace."""
    for tool in tools:
        if tool["type"] == "namespace":
            yield from ((tool["name"], each) for each in tool["tools"])
        else:
            yield None, tool


def flat_name(namespace: Any, name: Any) -> Any:
    """What the model calls a function. What is no name stays what it is, for who checks it."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and isinstance(name, str) else name


# ----------------------------------------------------------------------------------------------------------------------
# From a model's text to items, with the events that tell of them while they come.

ID_BYTES = 12
NOTHING: Mapping[str, Json] = {}


class OutputItems:
    """The items of one output, as its parsed text comes. Ids follow from the session's: told again they are the same.

    A call is told once it is whole, because one that breaks off is text.
    """

    def __init__(self, session_id: str, namespaced: Mapping[str, Json] = NOTHING) -> None:
        """namespaced: by the flat name of a function of a namespace, `name` and `namespace`."""
        self.items: list[Json] = []
        self._session_id = session_id
        self._namespaced = namespaced
        self._open: Json | None = None
        self._calls: dict[int, list[str]] = {}

    def take(self, events: Sequence[OutputEvent]) -> Iterator[Json]:
        """Events without their sequence numbers."""
        for event in events:
            match event:
                case ReasoningDelta():
                    yield from self._text("reasoning", event.text)
                case ContentDelta():
                    yield from self._text("message", event.text)
                case CallBegun():
                    self._calls[event.index] = [event.name, ""]
                case CallDelta():
                    self._calls[event.index][1] += event.arguments
                case CallEnded(whole=True):
                    yield from self._call(*self._calls.pop(event.index))
                case CallEnded():
                    self._calls.pop(event.index, None)
                    yield from self._text("message", event.raw)

    def end(self, whole: bool) -> Iterator[Json]:
        """whole: the text was not cut."""
        yield from self._close("completed" if whole else "incomplete")

    def _name(self, prefix: str, index: int) -> str:
        digest = hashlib.blake2b(f"{self._session_id}:{index}".encode(), digest_size=ID_BYTES).hexdigest()
        return f"{prefix}_{digest}"

    def _text(self, kind: str, text: str) -> Iterator[Json]:
        if self._open is None or self._open["type"] != kind:
            yield from self._close("completed")
            yield from self._begin(kind)
        item, at = self.items[-1], self._at()
        item["content"][0]["text"] += text
        if kind == "message":
            yield {"type": "response.output_text.delta", **at, "delta": text, "logprobs": []}
        else:  # OpenAI's name, which clients know; in Open Responses it is `response.reasoning.delta`
            yield {"type": "response.reasoning_text.delta", **at, "delta": text}

    def _begin(self, kind: str) -> Iterator[Json]:
        index = len(self.items)
        if kind == "message":
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item: Json = {"id": self._name("msg", index), "type": kind, "role": "assistant", "status": "in_progress"}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"id": self._name("rs", index), "type": kind, "summary": [], "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": {**item, "content": []}}
        self.items.append({**item, "content": [part]})
        self._open = self.items[-1]
        yield {"type": "response.content_part.added", **self._at(), "part": dict(part)}

    def _at(self) -> Json:
        item = self.items[-1]
        return {"item_id": item["id"], "output_index": len(self.items) - 1, "content_index": 0}

    def _close(self, status: str) -> Iterator[Json]:
        item, self._open = self._open, None
        if item is None:
            return
        at, part = self._at(), item["content"][0]
        item["status"] = status
        if item["type"] == "message":
            yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []}
        else:
            yield {"type": "response.reasoning_text.done", **at, "text": part["text"]}
        yield {"type": "response.content_part.done", **at, "part": part}
        yield {"type": "response.output_item.done", "output_index": at["output_index"], "item": item}

    def _call(self, name: str, arguments: str) -> Iterator[Json]:
        yield from self._close("completed")
        index = len(self.items)
        item = {
            "id": self._name("fc", index),
            "type": "function_call",
            "call_id": self._name("call", index),
            **self._namespaced.get(name, {"name": name}),
            "arguments": arguments,
            "status": "completed",
        }
        self.items.append(item)
        at = {"item_id": item["id"], "output_index": index}
        began = {**item, "arguments": "", "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": began}
        yield {"type": "response.function_call_arguments.delta", **at, "delta": arguments}
        yield {"type": "response.function_call_arguments.done", **at, "name": item["name"], "arguments": arguments}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
