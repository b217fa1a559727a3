"""A conversation as the text that the model was trained on: its chat template, rendered as transformers renders it.

`specwire.lm` finds the template beside the weights. It is code of the model's maker: it runs in Jinja's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specwire.core.sampling import InvalidParameter

Message = dict[str, Any]


class TemplateInvalid(ValueError):
    """The chat template itself does not compile."""


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

    def render(self, messages: Sequence[Message], add_generation_prompt: bool, more: Mapping[str, Any]) -> str:
        """The prompt. more: what the request gives the template beside the messages.

        Raises:
            InvalidParameter: the template refuses the messages, or cannot deal with them.
        """
        values = {**self._special_tokens, "tools": None, "documents": None, **more}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
        except TemplateError as error:
            raise InvalidParameter("messages", f"the chat template refuses them: {error}") from None
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            message = f"the chat template cannot render them: {type(error).__name__}: {error}"
            raise InvalidParameter("messages", message) from None


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
