"""The blocking client: the calls of `specwire.client.aio`, over channels that are waited for in the caller's thread."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from inspect import Signature, signature
from threading import Thread, current_thread
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

import grpc
import grpc.aio

from specwire.client.aio import AsyncClient, Concurrency
from specwire.client.events import Event
from specwire.client.stream import PATIENCE_S, Response
from specwire.rpc.channel import READ_AHEAD_BYTES, immediate, open_blocking_channel
from specwire.rpc.tls import ClientTls

T = TypeVar("T")
P = ParamSpec("P")
C = TypeVar("C")
Events = Generator[Event, None, None]


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


def _waited(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """A call of AsyncClient's that the caller's thread waits for."""

    @wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with _of_no_loop():
            return immediate(method(self._calls, *args, **kwargs))

    return _described(call, signature(method))


def _followed(
    method: Callable[Concatenate[AsyncClient, P], AsyncGenerator[Event, None]],
) -> Callable[Concatenate[Client, P], Events]:
    """Likewise, of a stream."""

    @wraps(method)
    def follow(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Events:
        events: Any = method(self._calls, *args, **kwargs)
        return _each(events)

    return _described(follow, signature(method).replace(return_annotation="Generator[Event, None, None]"))


def _described(call: C, shown: Signature) -> C:
    """A method of `Client`, to whoever asks what it is: no coroutine's."""
    method: Any = call
    method.__qualname__, method.__module__, method.__signature__ = f"Client.{method.__name__}", __name__, shown
    del method.__wrapped__
    return call


def _each(events: Any) -> Events:
    try:
        while True:
            try:
                with _of_no_loop():
                    event: Event = immediate(anext(events))
            except StopAsyncIteration:
                return
            yield event
    finally:
        with _of_no_loop():
            immediate(events.aclose())


@contextmanager
def _of_no_loop() -> Iterator[None]:
    """What begins meanwhile is its reader's. The event loop of a thread that has one would end it with itself."""
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        yield
    finally:
        sys.set_asyncgen_hooks(*hooks)


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
        """Where it calls now."""
        return self._calls.address

    generate = _followed(AsyncClient.generate)
    continue_ = _followed(AsyncClient.continue_)
    complete = _waited(AsyncClient.complete)
    chat = _waited(AsyncClient.chat)
    complete_many = _waited(AsyncClient.complete_many)
    watch = _followed(AsyncClient.watch)
    get_session = _waited(AsyncClient.get_session)
    cancel = _waited(AsyncClient.cancel)
    delete_session = _waited(AsyncClient.delete_session)
    server_info = _waited(AsyncClient.server_info)
    score_text = _waited(AsyncClient.score_text)
    close = _waited(AsyncClient.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
