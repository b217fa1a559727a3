"""A chat's talk: messages, tools and what else its template is told, taken from the request and put before it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from orchestrator.admission import MOST_TOOLS
from orchestrator.chat.fields import Fields, JsonBounds, made_constraint, shown
from orchestrator.chat.messages import check_count, take_messages
from orchestrator.chat.templates import ChatMessage
from specwire.core.invalid import InvalidParameter
from specwire.core.law.constraint import Constraint, ConstraintKind
from specwire.text.tool_calls.formats import THINK, THOUGHT, ChatFamily
from specwire.text.tool_calls.grammar import call_grammar
from specwire.text.tool_calls.readers import ToolFunction

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

    def opens_thought(self, prompt: str, family: ChatFamily) -> bool:
        """Whether the answer begins in the middle of the model's reasoning."""
        if not family.thinks:
            return False
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
    """What the model's template takes beside the messages: chat_template_kwargs, and OpenAI's own name for one."""
    inner, effort = fields.inner("chat_template_kwargs"), fields.text("reasoning_effort")
    more = {} if effort is None else {"reasoning_effort": effort}
    return more if inner is None else more | {name: inner.take(name) for name in inner.names()}
