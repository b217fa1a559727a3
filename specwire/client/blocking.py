"""The blocking client: the calls of `specwire.client.aio`, over channels that are waited for in the caller's thread."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Thread, current_thread
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast

import grpc
import grpc.aio

from specwire.client.aio import AsyncClient, Concurrency
from specwire.client.events import Completion, Event, SessionState, TextScore
from specwire.client.requests import TIMEOUT_S, Message, Prompt, RequestOptions, Text, Tool
from specwire.client.stream import PATIENCE_S, Response
from specwire.rpc.channel import READ_AHEAD_BYTES, immediate, open_blocking_channel
from specwire.rpc.tls import ClientTls
from specwire.v1 import generation_pb2

T = TypeVar("T")


class _Messages:
    """A stream, each message of which is there once it is asked for."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.cancel = call.cancel

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Response:
        try:
            message: Response = next(self._call)
            return message
        except StopIteration:
            raise StopAsyncIteration from None


class _Channel:
    """A blocking channel, to be called as asyncio's."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def unary_unary(self, *given: Any, **named: Any) -> Callable[..., Coroutine[Any, Any, Any]]:
        method = self._channel.unary_unary(*given, **named)

        async def ask(request: Any, **more: Any) -> Any:
            return method(request, **more)

        return ask

    def unary_stream(self, *given: Any, **named: Any) -> Callable[..., _Messages]:
        method = self._channel.unary_stream(*given, **named)
        return lambda request, **more: _Messages(method(request, **more))

    async def close(self, _: float | None) -> None:
        self._channel.close()


class _Threads(Concurrency):
    """A thread for each call. Where one of several raises, the others are waited for."""

    def open(self, address: str, tls: ClientTls | None, token: str) -> grpc.aio.Channel:
        return cast(grpc.aio.Channel, _Channel(open_blocking_channel(address, tls, token, READ_AHEAD_BYTES)))

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 # no event loop waits for it

    async def gather(self, calls: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
        with ThreadPoolExecutor(len(calls), thread_name_prefix="specwire-completion") as pool:
            return [each.result() for each in [pool.submit(immediate, call()) for call in calls]]

    def start(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        thread = Thread(target=self._run, args=(call,), name="specwire-farewell", daemon=True)
        self._started.add(thread)
        thread.start()

    def _run(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            immediate(call())
        finally:
            self._started.discard(current_thread())

    async def ended(self) -> None:
        for thread in list(self._started):
            thread.join()


class _Calls(AsyncClient):
    """Its coroutines have nothing to wait for: whoever runs them has waited."""

    _concurrency = _Threads


def _each(events: AsyncGenerator[Event, None]) -> Generator[Event, None, None]:
    try:
        while True:
            try:
                event = immediate(cast(Coroutine[Any, Any, Event], anext(events)))
            except StopAsyncIteration:
                return
            yield event
    finally:
        immediate(cast(Coroutine[Any, Any, None], events.aclose()))


class Client:
    """Calls GenerationService at one HOST:PORT, or at any of several that share a log. Calls end within `timeout` s.

    A generation survives the loss of its service: it goes on at another address, or at the same one once it is back,
    with the same text. See `specwire.client.stream`.

    Args:
        address: one, several with commas between them, or a sequence.
        tls: how the connections are encrypted, None for not.
        token: shown with every call, for a service that asks who calls; InvalidParameter if it would travel
            unencrypted.
        patience: seconds for which a call is retried while nobody serves it. With 0 nothing is retried, and a session
        ends with its first connection.

    Methods raise SpecwireError. Usable from several threads; close it, or use it as a context manager.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        tls: ClientTls | None = None,
        token: str = "",
        patience: float = PATIENCE_S,
    ) -> None:
        self._calls = _Calls(address, tls=tls, token=token, patience=patience)

    @property
    def address(self) -> str:
        return self._calls.address

    def generate(
        self, prompt: Prompt, *, timeout: float = TIMEOUT_S, **options: Unpack[RequestOptions]
    ) -> Generator[Event, None, None]:
        return _each(self._calls.generate(prompt, timeout=timeout, **options))

    def continue_(
        self, session_id: str, prompt: Prompt, *, timeout: float = TIMEOUT_S, **options: Unpack[RequestOptions]
    ) -> Generator[Event, None, None]:
        return _each(self._calls.continue_(session_id, prompt, timeout=timeout, **options))

    def complete(self, prompt: Prompt, *, timeout: float = TIMEOUT_S, **options: Unpack[RequestOptions]) -> Completion:
        return immediate(self._calls.complete(prompt, timeout=timeout, **options))

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        timeout: float = TIMEOUT_S,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        asked: dict[str, Any] = {"tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls, **options}
        return immediate(self._calls.chat(messages, tools=tools, timeout=timeout, **asked))

    def complete_many(
        self, prompt: Prompt, n: int, *, timeout: float = TIMEOUT_S, **options: Unpack[RequestOptions]
    ) -> list[Completion]:
        return immediate(self._calls.complete_many(prompt, n, timeout=timeout, **options))

    def watch(
        self, session_id: str, from_position: int = 0, *, prefix_hash: int | None = None, timeout: float = TIMEOUT_S
    ) -> Generator[Event, None, None]:
        return _each(self._calls.watch(session_id, from_position, prefix_hash=prefix_hash, timeout=timeout))

    def get_session(self, session_id: str, *, timeout: float = TIMEOUT_S) -> SessionState:
        return immediate(self._calls.get_session(session_id, timeout=timeout))

    def cancel(self, session_id: str, *, timeout: float = TIMEOUT_S) -> None:
        immediate(self._calls.cancel(session_id, timeout=timeout))

    def delete_session(self, session_id: str, *, timeout: float = TIMEOUT_S) -> None:
        immediate(self._calls.delete_session(session_id, timeout=timeout))

    def server_info(self, *, timeout: float = TIMEOUT_S) -> generation_pb2.GetServerInfoResponse:
        return immediate(self._calls.server_info(timeout=timeout))

    def score_text(
        self, prefix: Text, continuations: Sequence[Sequence[Text]], *, model: str = "", timeout: float = TIMEOUT_S
    ) -> list[TextScore]:
        return immediate(self._calls.score_text(prefix, continuations, model=model, timeout=timeout))

    def close(self) -> None:
        immediate(self._calls.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


for _name, _member in vars(Client).items():
    if not _name.startswith("_"):  # each does what AsyncClient's does
        _member.__doc__ = getattr(AsyncClient, _name).__doc__
