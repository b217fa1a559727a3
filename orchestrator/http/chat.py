"""A chat's messages as they are checked, before a template sees them."""

from __future__ import annotations

from typing import Any

from orchestrator.http.fields import Fields, shown
from orchestrator.http.templates import ChatMessage
from specwire.core.sampling import InvalidParameter

MOST_MESSAGES = 4096
# By what templates call each: OpenAI's newer name for instructions means the same.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Content parts that are text.
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def take_messages(fields: Fields) -> list[ChatMessage]:
    """The messages, the content of each one string. InvalidParameter names message and field."""
    value = fields.take("messages")
    if not isinstance(value, list) or not value:
        raise InvalidParameter("messages", "must be a list of at least one message")
    if len(value) > MOST_MESSAGES:
        raise InvalidParameter("messages", f"at most {MOST_MESSAGES} are allowed, not {len(value)}")
    return [_message(f"messages[{index}]", each) for index, each in enumerate(value)]


def _message(name: str, value: object) -> ChatMessage:
    if not isinstance(value, dict):
        raise InvalidParameter("messages", f"{name} must be an object, not {shown(value)}")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidParameter("messages", f"{name}.role must be one of {', '.join(ROLES)}, not {shown(role)}")
    for field in ("tool_calls", "function_call", "audio"):
        if value.get(field):
            raise InvalidParameter("messages", f"{name}.{field} is not served: there are no tools here")
    rest = {key: each for key, each in value.items() if each is not None and key not in ("tool_calls", "function_call")}
    return {**rest, "role": ROLES[role], "content": text_of(f"{name}.content", value.get("content"))}


def text_of(name: str, content: object, field: str = "messages") -> str:
    """A string, or parts of text, which are joined line by line; images and the like are refused."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(field, f"{name} must be a string or a list of parts, not {shown(content)}")
    return "\n".join(_part(f"{name}[{index}]", part, field) for index, part in enumerate(content))


def _part(name: str, part: Any, field: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if kind not in TEXT_PARTS or not isinstance(text, str):
        raise InvalidParameter(field, f"{name} must be a part of type text, not {shown(part)}")
    return text


def take_prediction(fields: Fields) -> str | None:
    """`prediction`: what the output may look like."""
    inner = fields.inner("prediction")
    if inner is None:
        return None
    inner.choice("type", ("content",))
    content = inner.take("content")
    inner.end()
    return text_of("content", content, "prediction") or None
