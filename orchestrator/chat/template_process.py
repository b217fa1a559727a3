"""The process in which chat templates are rendered; `orchestrator.chat.templates` forks and asks it.

`python -m orchestrator.chat.template_process CONTROL DATA SECONDS` is what the others are forked from. Needs the extra
http, for Jinja; who asks does not.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from orchestrator.chat.templates import BEYOND, MOST_MEMORY, MOST_TEXT, ChatMessage, TemplateInvalid
from specwire.core.invalid import InvalidParameter
from specwire.text.sandbox import limit, receive, send, serve


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's part for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """special_tokens: bos_token and the like, which templates name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises TemplateInvalid."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise TemplateInvalid(f"the chat template does not compile: line {error.lineno}: {error.message}") from None
        except (ArithmeticError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError) as error:
            # Jinja computes what is constant, and Python compiles what Jinja writes.
            message = f"the chat template does not compile: {type(error).__name__}: {error}"
            raise TemplateInvalid(message.removesuffix(": ")) from None

    def render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool, more: Mapping[str, Any]) -> str:
        """The prompt. more: what the request gives the template beside the messages.

        Raises:
            InvalidParameter: the template refuses the messages, or cannot deal with them.
        """
        values = {**self._special_tokens, "tools": None, "documents": None, **more}
        try:
            text = self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
            text.encode()
        except TemplateError as error:
            raise InvalidParameter("messages", f"the chat template refuses them: {error}") from None
        except MemoryError:
            raise InvalidParameter("messages", f"the chat template {BEYOND} for them") from None
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            message = f"the chat template cannot render them: {type(error).__name__}: {error}"
            raise InvalidParameter("messages", message) from None
        if len(text) > MOST_TEXT:
            message = f"the chat template makes {len(text)} characters of them; at most {MOST_TEXT} are a prompt"
            raise InvalidParameter("messages", message)
        return text


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str, now: Callable[[], datetime] = datetime.now) -> str:
    return now().strftime(form)


def main() -> None:
    compute = float(sys.argv[3])
    serve(socket.socket(fileno=int(sys.argv[1])), lambda fd: _session(fd, compute), MOST_MEMORY)


def _session(fd: int, compute: float) -> None:
    """Render one template until its service closes it. Raises Lost."""
    asked, _ = receive(fd)
    limit(compute)
    try:
        template = ChatTemplate(asked["source"], asked["special_tokens"])
    except TemplateInvalid as error:
        send(fd, {"error": str(error)})
        return
    send(fd, {})
    while True:
        limit(0.0)
        asked, _ = receive(fd)
        limit(compute)
        try:
            text = template.render(asked["messages"], asked["add_generation_prompt"], asked["more"])
        except InvalidParameter as error:
            send(fd, {"error": str(error).removeprefix(f"{error.field}: ")})
        else:
            send(fd, {}, text.encode())


if __name__ == "__main__":
    main()
