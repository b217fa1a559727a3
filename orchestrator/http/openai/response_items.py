"""Items of OpenAI's Responses API: those of a request become a chat's messages, a model's text becomes others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from orchestrator.admission import MOST_ITEMS
from orchestrator.chat.fields import shown
from orchestrator.chat.messages import check_count, text_of
from specwire.core.invalid import InvalidParameter
from specwire.text.tool_calls.parser import CallBegun, CallDelta, CallEnded, ContentDelta, OutputEvent, ReasoningDelta

Json = dict[str, Any]

# ----------------------------------------------------------------------------------------------------------------------
# From a request's items to messages.


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
    return messages


def _call(path: str, item: Json) -> Json:
    for name in ("call_id", "name"):
        if not isinstance(item.get(name), str):
            raise InvalidParameter("input", f"{path}.{name} must be a string, not {shown(item.get(name))}")
    function = {"name": item["name"], "arguments": item.get("arguments")}
    return {"id": item["call_id"], "type": "function", "function": function}


def _add_call(messages: list[Json], call: Json) -> None:
    """Calls of one turn, and the text before them, are one message."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def chat_tools(value: object) -> object:
    """`tools` as a chat's request has them; what is none is left for who checks those. Only functions are served."""
    if not isinstance(value, list):
        return value
    for index, each in enumerate(value):
        if not isinstance(each, dict) or each.get("type") != "function":
            kind = each.get("type") if isinstance(each, dict) else each
            raise InvalidParameter("tools", f"tools[{index}].type: {shown(kind)} is not served, functions are")
    return [{"type": "function", "function": {k: v for k, v in each.items() if k != "type"}} for each in value]


def chat_choice(value: object) -> object:
    """`tool_choice` likewise."""
    if isinstance(value, dict) and value.get("type") == "function":
        return {"type": "function", "function": {"name": value.get("name")}}
    return value


# ----------------------------------------------------------------------------------------------------------------------
# From a model's text to items, with the events that tell of them while they come.

ID_BYTES = 12


class OutputItems:
    """The items of one output, as its parsed text comes. Ids follow from the session's: told again they are the same.

    A call is told once it is whole, because one that breaks off is text.
    """

    def __init__(self, session_id: str) -> None:
        self.items: list[Json] = []
        self._session_id = session_id
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
        else:
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
            "name": name,
            "arguments": arguments,
            "status": "completed",
        }
        self.items.append(item)
        at = {"item_id": item["id"], "output_index": index}
        began = {**item, "arguments": "", "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": began}
        yield {"type": "response.function_call_arguments.delta", **at, "delta": arguments}
        yield {"type": "response.function_call_arguments.done", **at, "name": name, "arguments": arguments}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
