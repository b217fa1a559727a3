"""A chat's messages as they are checked, before a template sees them."""

from __future__ import annotations

import json
from typing import Any

from orchestrator.admission import MOST_MESSAGES
from orchestrator.chat.fields import Fields, JsonBounds, no_number, shown
from orchestrator.chat.templates import ChatMessage
from specwire.core.invalid import InvalidParameter

# By what templates call each: OpenAI's newer name for instructions means the same.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Content parts that are text.
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def take_messages(fields: Fields, bounds: JsonBounds | None = None) -> list[ChatMessage]:
    """The messages, the content of each one string. InvalidParameter names message and field.

    bounds: of JSON in strings, where the request has more of it.
    """
    value = fields.take("messages")
    if not isinstance(value, list) or not value:
        raise InvalidParameter("messages", "must be a list of at least one message")
    check_count("messages", len(value), MOST_MESSAGES)
    bounds = bounds or JsonBounds()
    return [_message(f"messages[{index}]", each, bounds) for index, each in enumerate(value)]


def check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidParameter(field, f"at most {most} are allowed, not {count}")


def _message(name: str, value: object, bounds: JsonBounds) -> ChatMessage:
    if not isinstance(value, dict):
        raise InvalidParameter("messages", f"{name} must be an object, not {shown(value)}")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidParameter("messages", f"{name}.role must be one of {', '.join(ROLES)}, not {shown(role)}")
    for field in ("function_call", "audio"):
        if value.get(field):
            raise InvalidParameter("messages", f"{name}.{field} is not served")
    rest = {key: each for key, each in value.items() if each is not None and key not in ("tool_calls", "function_call")}
    calls, content = value.get("tool_calls"), value.get("content")
    if calls:
        if role != "assistant":
            raise InvalidParameter("messages", f"{name}.tool_calls is for assistants, not {role}")
        rest["tool_calls"] = _calls(f"{name}.tool_calls", calls, bounds)
    content = "" if content is None and role == "assistant" else content  # clients leave it out
    return {**rest, "role": ROLES[role], "content": text_of(f"{name}.content", content)}


def _calls(name: str, value: object, bounds: JsonBounds) -> list[dict[str, Any]]:
    """With arguments as objects: what templates write as JSON."""
    if not isinstance(value, list):
        raise InvalidParameter("messages", f"{name} must be a list, not {shown(value)}")
    return [_call(f"{name}[{index}]", each, bounds) for index, each in enumerate(value)]


def _call(name: str, value: object, bounds: JsonBounds) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict):
        raise InvalidParameter("messages", f"{name} must be an object with a function, not {shown(value)}")
    if value.get("type") not in (None, "function"):
        raise InvalidParameter("messages", f"{name}.type must be 'function', not {shown(value['type'])}")
    if not isinstance(function.get("name"), str):
        raise InvalidParameter("messages", f"{name}.function.name must be a string, not {shown(function.get('name'))}")
    arguments = _arguments(f"{name}.function.arguments", function.get("arguments"), bounds)
    return {**value, "type": "function", "function": {**function, "arguments": arguments}}


# Around JSON, as some models write it.
FENCE, FENCED_AS = "```", "json"


def _arguments(name: str, value: object, bounds: JsonBounds) -> dict[str, Any]:
    """An object, for templates: of a text that is none, as a call's that was cut, one with that text as `arguments`.

    None and "" are what some clients send where there are none. As text they passed the body's bounds as one string,
    whatever they become: `bounds` holds those of all messages.
    """
    if isinstance(value, str):
        found = _json_of(name, value, bounds)
        if isinstance(found, str):  # some servers write them as a string's JSON
            found = _json_of(name, found, bounds)
        return found if isinstance(found, dict) else {"arguments": value} if value.strip() not in ("", "null") else {}
    if not isinstance(value, dict | None):
        message = f"{name} must be a JSON object, or one as a string, not {shown(value)}"
        raise InvalidParameter("messages", message)
    return value or {}


def _json_of(name: str, text: str, bounds: JsonBounds) -> object:
    """The value; None where it is none."""
    plain = text.strip()
    if plain.startswith(FENCE) and plain.endswith(FENCE):
        plain = plain[len(FENCE) : -len(FENCE)].removeprefix(FENCED_AS)
    bounds.check(plain.encode(errors="surrogatepass"), "messages", name)
    try:
        return json.loads(plain, parse_constant=no_number)
    except (ValueError, RecursionError):
        return None


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
