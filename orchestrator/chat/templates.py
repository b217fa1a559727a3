"""A conversation as the text that the model was trained on: its chat template, rendered as transformers renders it.

`specwire.lm` finds the template beside the weights. A template is code from the model's maker. It runs in Jinja's
sandbox, which keeps it from files and from Python, and in processes with limits on time and memory
(`specwire.text.sandbox`, `orchestrator.chat.template_process`), which the sandbox does not bound. They stay, so that a
chat costs no fork; one that was ended at its limits is replaced at the next chat.
"""

from __future__ import annotations

import asyncio
import importlib.util
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from specwire.core.invalid import InvalidParameter
from specwire.text.sandbox import Busy, ForkServer, Lost, ask, readable

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


def installed() -> bool:
    return importlib.util.find_spec("jinja2") is not None


class TemplateInvalid(ValueError):
    """The chat template itself does not compile."""


def renderers(compute: float = COMPUTE_S) -> ForkServer:
    """For templates of several models. compute: seconds of processor time, for compiling one and each conversation."""
    return ForkServer("orchestrator.chat.template_process", [str(compute)])


class RemoteTemplate:
    """A `template_process.ChatTemplate`, in processes of its own.

    Invariant: a process in `_idle` has compiled the template, and waits for the next conversation.
    """

    def __init__(self, forks: ForkServer, source: str, special_tokens: Mapping[str, str]) -> None:
        self._forks = forks
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._idle: list[socket.socket] = []
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
            text = "" if asked is None else await _answer(process, asked)
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

    def _ready(self) -> socket.socket | None:
        """The connection to an idle process, if there is one; some may have died meanwhile.

        An idle one was asked nothing, so anything to read is its end.
        """
        while self._idle:
            process = self._idle.pop()
            if not readable(process.fileno(), 0.0):
                return process
            process.close()
        return None

    def _rest(self, process: socket.socket) -> None:
        if self._closed:
            process.close()
        else:
            self._idle.append(process)

    async def _started(self) -> socket.socket:
        process = await self._forks.begun()
        with ExitStack() as unless_it_compiles:
            unless_it_compiles.callback(process.close)
            try:
                await _answer(process, {"source": self._source, "special_tokens": self._special_tokens})
            except InvalidParameter as error:
                raise TemplateInvalid(str(error).removeprefix(f"{error.field}: ")) from None
            except Lost:
                raise TemplateInvalid(f"the chat template cannot be compiled: it {BEYOND} for that") from None
            unless_it_compiles.pop_all()
        return process

    def close(self) -> None:
        """End the processes of a model that is gone. What is being rendered is finished."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()


async def _answer(process: socket.socket, asked: dict[str, Any]) -> str:
    """What a process has rendered. Raises InvalidParameter, which is its answer; Lost."""
    try:
        said, text = await ask(process, asked)
    except OSError as error:
        raise Lost(str(error)) from None
    if "error" in said:
        raise InvalidParameter("messages", said["error"])
    return text.decode()
