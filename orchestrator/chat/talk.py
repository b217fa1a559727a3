"""A chat's talk: messages, tools and what else its template is told, checked and put before it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from orchestrator.admission import MOST_JSON_BYTES, MOST_MESSAGES, MOST_TOOLS
from orchestrator.chat.fields import Fields, JsonBounds, check_count, made_constraint, no_number, shown
from orchestrator.chat.templates import ChatMessage
from specwire.core.invalid import InvalidParameter
from specwire.core.law.constraint import Constraint, ConstraintKind
from specwire.rpc.convert import check_known
from specwire.text.tool_calls.formats import THINK, THOUGHT, ChatFamily
from specwire.text.tool_calls.grammar import call_grammar
from specwire.text.tool_calls.readers import ToolFunction
from specwire.v1 import generation_pb2 as pb

# ----------------------------------------------------------------------------------------------------------------------
# Messages, as they are checked before a template sees them.

# By what templates call each: OpenAI's newer name for instructions means the same.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Content parts that are text.
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
SUMMARIES = ("auto", "concise", "detailed")


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


# ----------------------------------------------------------------------------------------------------------------------
# The fields: `tools`, `tool_choice`, `parallel_tool_calls`.

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
AUTO, NONE, REQUIRED = "auto", "none", "required"
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a chat may call.

    Attributes:
        told: the tools as the caller describes them, for the template.
        functions: those that may be called; none with `tool_choice` "none".
        forced: the answer is a call. several: it may have more than one.
    """

    told: tuple[dict[str, Any], ...] = ()
    functions: tuple[ToolFunction, ...] = ()
    forced: bool = False
    several: bool = True

    @property
    def held(self) -> bool:
        """Whether a grammar must see to what was asked for."""
        return self.forced or bool(self.functions and not self.several) or any(each.strict for each in self.functions)

    async def constraint(self, family: ChatFamily, thinking: bool | None) -> Constraint | None:
        """What form the answer must have. thinking: as of `OutputParser`.

        InvalidParameter: the tools are too much for one.
        """
        return await asyncio.to_thread(self._constraint, family, bool(thinking)) if self.held else None

    def _constraint(self, family: ChatFamily, thought: bool) -> Constraint:
        grammar = call_grammar(family.format, self.functions, self.forced, self.several, thought)
        return made_constraint("tools", ConstraintKind.GRAMMAR, [grammar])


def take_tools(fields: Fields) -> ToolUse:
    """InvalidParameter names the field."""
    fields.fixed("functions", [])
    fields.fixed("function_call", NONE, AUTO)
    value, choice = fields.take("tools"), fields.take("tool_choice")
    several = fields.flag("parallel_tool_calls", default=True)
    if not isinstance(value, list | None):
        raise InvalidParameter("tools", f"must be a list of tools, not {shown(value)}")
    if not value:
        if choice not in (None, NONE, AUTO):
            raise InvalidParameter("tool_choice", f"{shown(choice)} needs tools")
        return ToolUse()
    check_count("tools", len(value), MOST_TOOLS)
    functions = {}
    for index, each in enumerate(value):
        function = _function(f"tools[{index}]", each)
        if function.name in functions:
            raise InvalidParameter("tools", f"tools[{index}].function.name: {function.name!r} stands there twice")
        functions[function.name] = function
    return _chosen(tuple(value), functions, choice, several)


def _function(path: str, value: object) -> ToolFunction:
    if not isinstance(value, dict):
        raise InvalidParameter("tools", f"{path} must be an object, not {shown(value)}")
    if value.get("type") != "function":
        raise InvalidParameter("tools", f"{path}.type must be 'function', not {shown(value.get('type'))}")
    inner = value.get("function")
    if not isinstance(inner, dict):
        raise InvalidParameter("tools", f"{path}.function must be an object, not {shown(inner)}")
    name, parameters, strict = inner.get("name"), inner.get("parameters"), inner.get("strict")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        message = f"{path}.function.name must be 1 to 128 letters, digits, _, . or -, not {shown(name)}"
        raise InvalidParameter("tools", message)
    if not isinstance(inner.get("description"), str | None):
        raise InvalidParameter("tools", f"{path}.function.description must be a string")
    if parameters is None:
        parameters = NO_PARAMETERS
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        message = f"{path}.function.parameters must be the JSON schema of an object, not {shown(parameters)}"
        raise InvalidParameter("tools", message)
    if not isinstance(parameters.get("x-guidance", {}), dict):
        raise InvalidParameter("tools", f"{path}.function.parameters.x-guidance must be an object")
    if not isinstance(strict, bool | None):
        raise InvalidParameter("tools", f"{path}.function.strict must be true or false, not {shown(strict)}")
    return ToolFunction(name, parameters, bool(strict))


def _chosen(
    told: tuple[dict[str, Any], ...], functions: dict[str, ToolFunction], choice: object, several: bool
) -> ToolUse:
    everything = tuple(functions.values())
    match choice:
        case None | "auto":
            return ToolUse(told, everything, several=several)
        case "none":
            return ToolUse()
        case "required":
            return ToolUse(told, everything, forced=True, several=several)
        case {"type": "function", "function": {"name": str(name)}} if name in functions:
            return ToolUse(told, (functions[name],), forced=True, several=False)
        case {"type": "function", "function": {"name": name}}:
            raise InvalidParameter("tool_choice", f"function.name: {shown(name)} is none of the tools")
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)}}:
            return ToolUse(told, _allowed(functions, allowed), forced=mode == REQUIRED, several=several)
    message = f"must be none, auto, required, a function by name or allowed_tools, not {shown(choice)}"
    raise InvalidParameter("tool_choice", message)


def _allowed(functions: dict[str, ToolFunction], allowed: list[object]) -> tuple[ToolFunction, ...]:
    found = {}
    for each in allowed:
        match each:
            case {"type": "function", "function": {"name": str(name)}} if name in functions:
                found[name] = functions[name]
            case _:
                raise InvalidParameter("tool_choice", f"allowed_tools.tools: {shown(each)} is none of the tools")
    if not found:
        raise InvalidParameter("tool_choice", "allowed_tools.tools must not be empty")
    return tuple(found.values())


# ----------------------------------------------------------------------------------------------------------------------
# What a template is told. One that knows no tools gets them as text.

INSTRUCTION = """You may call these functions, each described by a JSON schema:
{tools}
To call some, answer with nothing but their names and arguments, in this form:
{calls}"""
EXAMPLES = [("first_function", {"first_argument": "value"}), ("second_function", {"second_argument": "value"})]


def told_messages(messages: Sequence[ChatMessage], tools: ToolUse, family: ChatFamily) -> list[ChatMessage]:
    """The messages as the template can write them."""
    if family.tells:
        known = _with_ids(messages, family.format.ids) if family.format.ids else messages
        return [_with_text(each) if family.as_text else each for each in known]
    plain = [_without_calls(each, family) for each in messages]
    if not tools.told:
        return plain
    listed = "\n".join(json.dumps(each["function"], ensure_ascii=False) for each in tools.told)
    text = INSTRUCTION.format(tools=listed, calls=family.format.written(EXAMPLES))
    first, *others = plain
    match first["role"]:
        case "system":
            return [{**first, "content": f"{first['content']}\n\n{text}"}, *others]
        case "user":  # some templates refuse system messages
            return [{**first, "content": f"{text}\n\n{first['content']}"}, *others]
    return [{"role": "system", "content": text}, *plain]


def _with_ids(messages: Sequence[ChatMessage], form: str) -> list[ChatMessage]:
    """With ids of calls as the model writes them: its template shows those that the caller sent."""
    ids: dict[str, str] = {}
    numbers = count()
    told = []
    for message in messages:
        calls = list(message.get("tool_calls", ()))
        for index, call in enumerate(calls):
            name = form.format(name=call["function"]["name"], number=next(numbers))
            ids[str(call.get("id"))], calls[index] = name, {**call, "id": name}
        answered = ids.get(str(message.get("tool_call_id"))) if message["role"] == "tool" else None
        more = {"tool_calls": calls} if calls else {"tool_call_id": answered} if answered else {}
        told.append({**message, **more})
    return told


def _with_text(message: ChatMessage) -> ChatMessage:
    """With the arguments of its calls as text."""
    calls = [
        {**each, "function": {**each["function"], "arguments": json.dumps(each["function"]["arguments"])}}
        for each in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def _without_calls(message: ChatMessage, family: ChatFamily) -> ChatMessage:
    """With its calls as text, as the model writes them."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [each["function"] for each in calls]
    text = family.format.written([(each["name"], each["arguments"]) for each in functions])
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": f"{message['content']}\n{text}" if message["content"] else text}


# ----------------------------------------------------------------------------------------------------------------------
# All of it.

# Marks where the last message ends in what the template makes, as transformers does it; the space tells whether the
# template keeps what ends a message.
END_MARK = "SPECWIRE_END_OF_THE_FINAL_MESSAGE "


@dataclass(frozen=True, slots=True)
class Talk:
    """What a template is told.

    Attributes:
        asks: the prompt asks for an answer (`add_generation_prompt`).
        goes_on: the answer goes on with the last message (`continue_final_message`).
        more: further values for the template.
    """

    messages: list[ChatMessage]
    tools: ToolUse
    asks: bool
    goes_on: bool
    more: dict[str, Any]

    def told(self, family: ChatFamily) -> tuple[list[ChatMessage], dict[str, Any]]:
        """Messages and values for a template of this family."""
        messages = told_messages(self.messages, self.tools, family)
        if self.goes_on:
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": last["content"] + END_MARK}]
        return messages, {"tools": list(self.tools.told), **self.more} if self.tools.told else self.more

    def prompt(self, rendered: str) -> str:
        """The prompt in what the template has made. InvalidParameter: it does not have the last message."""
        if not self.goes_on:
            return rendered
        end = rendered.rfind(END_MARK.strip())
        if end < 0:
            message = "the chat template does not write the last message whole"
            raise InvalidParameter("continue_final_message", message)
        return rendered[:end] if rendered.startswith(END_MARK, end) else rendered[:end].rstrip()

    def opens_thought(self, prompt: str) -> bool:
        """Whether the answer of a model that thinks begins in the middle of its reasoning."""
        if self.goes_on:
            last = self.messages[-1]["content"]
            return bool(last.rfind(THINK) > last.rfind(THOUGHT))
        return prompt.rstrip().endswith(THINK)


def take_talk(fields: Fields, bounds: JsonBounds | None = None) -> Talk:
    """InvalidParameter names the field. bounds: as of `take_messages`."""
    messages, tools = take_messages(fields, bounds), take_tools(fields)
    goes_on, asks = fields.flag("continue_final_message"), fields.flag_if_any("add_generation_prompt")
    if goes_on and asks:
        raise InvalidParameter("continue_final_message", "contradicts add_generation_prompt")
    return Talk(messages, tools, not goes_on if asks is None else asks, goes_on, _template_values(fields))


def _template_values(fields: Fields) -> dict[str, Any]:
    """What the model's template takes beside the messages: chat_template_kwargs, and OpenAI's own names for one."""
    inner, effort, newer = fields.inner("chat_template_kwargs"), fields.text("reasoning_effort"), take_reasoning(fields)
    if effort is not None and newer["effort"] not in (None, effort):
        raise InvalidParameter("reasoning_effort", f"contradicts reasoning.effort, {shown(newer['effort'])}")
    effort = effort or newer["effort"]
    more = {} if effort is None else {"reasoning_effort": effort}
    return more if inner is None else more | {name: inner.take(name) for name in inner.names()}


def take_reasoning(fields: Fields) -> dict[str, str | None]:
    """`reasoning`, as a response tells it. Nothing is summarised: reasoning is told whole.

    `generate_summary` is an older name of `summary`. Earlier reasoning is shown as the chat template does.
    """
    inner = fields.inner("reasoning") or Fields({})
    older, newer = (inner.choice(name, SUMMARIES) for name in ("generate_summary", "summary"))
    told = {"effort": inner.text("effort"), "summary": newer or older}
    inner.fixed("context", "auto")
    inner.fixed("mode", "standard")
    inner.end()
    return told


# ----------------------------------------------------------------------------------------------------------------------
# A chat over gRPC: as the fields that HTTP's callers send, so that both are checked alike.

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
        "messages": [_told_message(f"messages[{index}]", each) for index, each in enumerate(chat.messages)],
        "tools": [_told_tool(f"tools[{index}]", each, values) for index, each in enumerate(chat.tools)],
        "tool_choice": _told_choice(chat),
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


def _told_message(name: str, message: pb.ChatMessage) -> dict[str, Any]:
    """What is empty was not said, but the content."""
    check_known(message, name)
    said = {"name": message.name, "reasoning_content": message.reasoning_content, "tool_call_id": message.tool_call_id}
    calls = [_told_call(f"{name}.tool_calls[{index}]", each) for index, each in enumerate(message.tool_calls)]
    told = {"role": message.role, "content": message.content, **{key: text for key, text in said.items() if text}}
    return {**told, "tool_calls": calls} if calls else told


def _told_call(name: str, call: pb.ToolCall) -> dict[str, Any]:
    check_known(call, name)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _told_tool(name: str, tool: pb.ChatTool, values: JsonValues) -> dict[str, Any]:
    check_known(tool, name)
    parameters = values.object("tools", f"{name}.parameters", tool.parameters)
    said = {"description": tool.description or None, "parameters": parameters, "strict": tool.strict or None}
    function = {"name": tool.name, **{key: value for key, value in said.items() if value is not None}}
    return {"type": "function", "function": function}


def _told_choice(chat: pb.Chat) -> object:
    if chat.tool_choice not in CHOICES:
        raise InvalidParameter("tool_choice", f"{chat.tool_choice} is not a known value")
    if not chat.tool_name:
        return CHOICES[chat.tool_choice]
    if chat.tool_choice != pb.TOOL_CHOICE_UNSPECIFIED:
        raise InvalidParameter("tool_name", "contradicts tool_choice: give one of the two")
    if chat.tool_name not in [each.name for each in chat.tools]:
        raise InvalidParameter("tool_name", f"{shown(chat.tool_name)} is none of the tools")
    return {"type": "function", "function": {"name": chat.tool_name}}
