"""A conversation as the text that the model was trained on: its chat template, rendered as transformers renders it.

`specwire.lm` finds the template beside the weights. A template is code from the model's maker. It runs in Jinja's
sandbox, which keeps it from files and from Python, and in processes with limits on time and memory
(`specwire.text.sandbox`), which the sandbox does not bound. `python -m orchestrator.http.templates` is what those are
forked from. They stay, so that a chat costs no fork; one that was ended at its limits is replaced at the next chat.
"""

from __future__ import annotations

import asyncio
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

from specwire.core.invalid import InvalidParameter
from specwire.text.sandbox import (
    HEAD,
    Busy,
    ForkServer,
    Lost,
    lengths_of,
    limit,
    packed,
    readable,
    receive,
    send,
    serve,
)

ChatMessage = dict[str, Any]

# Seconds of processor time, for compiling a template and for rendering a conversation.
COMPUTE_S = 2.0
# Seconds in all, waiting and a process's start included: for a conversation, whose caller waits; and for a template at
# a service's start, where a busy machine is no reason to give up.
LIMIT_S = 20.0
START_LIMIT_S = 120.0
MOST_MEMORY = 512 << 20
# Most characters of a prompt: a request's body has fewer.
MOST_TEXT = 16 << 20
# Conversations of one model that are rendered at once, and those that wait in all.
AT_ONCE, MOST_WAITING = 2, 256
BEYOND = f"took more computing or memory than it may, {COMPUTE_S:g} s or {MOST_MEMORY >> 20} MiB,"


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


class Renderer:
    """Templates of several models. Nothing is started before one is used.

    compute: seconds of processor time for compiling a template, and for each conversation.
    """

    def __init__(self, compute: float = COMPUTE_S) -> None:
        self._forks = ForkServer("orchestrator.http.templates", [str(compute)])

    def template(self, source: str, special_tokens: Mapping[str, str]) -> RemoteTemplate:
        return RemoteTemplate(self._forks, source, special_tokens)

    async def stop(self) -> None:
        """Idempotent."""
        await asyncio.to_thread(self._forks.stop)


class RemoteTemplate:
    """A `ChatTemplate` in processes of its own.

    Invariant: a process in `_idle` has compiled the template, and waits for the next conversation.
    """

    def __init__(self, forks: ForkServer, source: str, special_tokens: Mapping[str, str]) -> None:
        self._forks = forks
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._idle: list[_Process] = []
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0
        self._closed = False

    async def compile(self) -> None:
        """Compile the template when a service starts. Raises TemplateInvalid, Busy."""
        await self._asked(None, START_LIMIT_S)

    async def render(
        self, messages: Sequence[ChatMessage], add_generation_prompt: bool, more: Mapping[str, Any]
    ) -> str:
        """The prompt. more: what the request gives the template beside the messages.

        Raises:
            InvalidParameter: the template refuses the messages, cannot deal with them, or takes too much for them.
            TemplateInvalid: it does not compile.
            Busy: too many wait, it was not rendered in time, or no process could be had for it.
        """
        asked = {"messages": messages, "add_generation_prompt": add_generation_prompt, "more": dict(more)}
        return await self._asked(asked, LIMIT_S)

    async def _asked(self, asked: dict[str, Any] | None, limit_s: float) -> str:
        if self._waiting >= MOST_WAITING:
            raise Busy(f"messages: {MOST_WAITING} conversations wait to be rendered")
        self._waiting += 1
        try:
            async with asyncio.timeout(limit_s), self._turns:
                return await self._rendered(asked)
        except TimeoutError:
            raise Busy(f"messages: were not rendered within {limit_s:g} s") from None
        finally:
            self._waiting -= 1

    async def _rendered(self, asked: dict[str, Any] | None) -> str:
        process = self._ready() or await self._started()
        try:
            text = "" if asked is None else await process.ask(asked)
        except InvalidParameter:
            self._rest(process)
            raise
        except Lost as lost:
            process.close()
            raise InvalidParameter("messages", f"the chat template {BEYOND} for them") from lost
        except BaseException:  # it may be in the middle of an answer
            process.close()
            raise
        self._rest(process)
        return text

    def _ready(self) -> _Process | None:
        """An idle process, if there is one; some may have died meanwhile."""
        while self._idle:
            process = self._idle.pop()
            if not process.gone:
                return process
            process.close()
        return None

    def _rest(self, process: _Process) -> None:
        if self._closed:
            process.close()
        else:
            self._idle.append(process)

    async def _started(self) -> _Process:
        process = await _Process.started(await self._forks.begun())
        try:
            await process.ask({"source": self._source, "special_tokens": self._special_tokens})
        except InvalidParameter as error:
            process.close()
            raise TemplateInvalid(str(error).removeprefix(f"{error.field}: ")) from None
        except Lost:
            process.close()
            raise TemplateInvalid(f"the chat template cannot be compiled: it {BEYOND} for that") from None
        except BaseException:
            process.close()
            raise
        return process

    def close(self) -> None:
        """End the processes of a model that is gone. What is being rendered is finished."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()


class _Process:
    """The connection to one such process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def started(cls, connection: socket.socket) -> _Process:
        return cls(*await asyncio.open_connection(sock=connection))

    @property
    def gone(self) -> bool:
        """Whether an idle process has ended: it was asked nothing, so anything to read is its end."""
        return self._reader.at_eof() or readable(self._writer.get_extra_info("socket").fileno(), 0.0)

    async def ask(self, asked: dict[str, Any]) -> str:
        """Raises InvalidParameter, which is its answer; Lost."""
        try:
            self._writer.write(packed(asked))
            await self._writer.drain()
            head, data = lengths_of(await self._reader.readexactly(HEAD))
            said = json.loads(await self._reader.readexactly(head))
            text = (await self._reader.readexactly(data)).decode()
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Lost(str(error)) from None
        if "error" in said:
            raise InvalidParameter("messages", said["error"])
        return text

    def close(self) -> None:
        self._writer.close()


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
