"""The client for asyncio; method by method as the blocking one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc
import grpc.aio

from specwire.client.errors import from_rpc
from specwire.client.events import (
    Completion,
    Event,
    Gathering,
    Response,
    SessionState,
    event_from_wire,
    session_from_wire,
)
from specwire.client.requests import TIMEOUT_S, Options, Prompt, generate_request, watch_request
from specwire.rpc.channel import open_channel
from specwire.rpc.tls import ClientTls
from specwire.v1 import generation_pb2, generation_pb2_grpc

Q = TypeVar("Q", contravariant=True)
A = TypeVar("A", covariant=True)


class Stream(Protocol):
    """A server stream as gRPC gives it."""

    def __aiter__(self) -> AsyncIterator[Response]: ...

    def cancel(self) -> object: ...


class Starting(Protocol[Q]):
    def __call__(self, request: Q, *, timeout: float) -> Stream: ...


class Unary(Protocol[Q, A]):
    def __call__(self, request: Q, *, timeout: float) -> Awaitable[A]: ...


class AsyncClient:
    """A connection to GenerationService at HOST:PORT, encrypted if `tls` says how. Calls end within `timeout` s.

    token: shown with every call, for a service that asks who calls; InvalidParameter if it would travel unencrypted.

    Methods raise SpecwireError. Make it in a running event loop; close it, or use it as a context manager.
    """

    def __init__(self, address: str, *, tls: ClientTls | None = None, token: str = "") -> None:
        self.address = address
        self._tls = tls is not None
        self._channel = open_channel(address, tls, token)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    def generate(
        self, prompt: Prompt, *, timeout: float = TIMEOUT_S, **options: Unpack[Options]
    ) -> AsyncGenerator[Event, None]:
        """Started, Chunks (Provisionals between them where asked for), Finished. Closing it early cancels.

        See `generate_request` for the options.
        """
        request = generate_request(prompt, **options)
        return self._events(self._stub.Generate, request, timeout)

    async def complete(self, prompt: Prompt, *, timeout: float = TIMEOUT_S, **options: Unpack[Options]) -> Completion:
        """The whole generation at once. A session that failed half-way has finish_reason ERROR and its message."""
        gathering = Gathering()
        async for event in self.generate(prompt, timeout=timeout, **options):
            gathering.add(event)
        return gathering.completion()

    def watch(
        self, session_id: str, from_position: int = 0, *, prefix_hash: int | None = None, timeout: float = TIMEOUT_S
    ) -> AsyncGenerator[Event, None]:
        """Follow a session; 0 starts behind the prompt. Leaving early does not end it.

        prefix_hash: `specwire.core.text.hash_of` the text before from_position; a contradiction is DATA_LOSS.
        """
        request = watch_request(session_id, from_position, prefix_hash)
        return self._events(self._stub.Watch, request, timeout)

    async def get_session(self, session_id: str, *, timeout: float = TIMEOUT_S) -> SessionState:
        request = generation_pb2.GetSessionRequest(session_id=session_id)
        return session_from_wire(await self._ask(self._stub.GetSession, request, timeout))

    async def cancel(self, session_id: str, *, timeout: float = TIMEOUT_S) -> None:
        """Tell a session to end; its stream says when it has."""
        await self._ask(self._stub.Cancel, generation_pb2.CancelRequest(session_id=session_id), timeout)

    async def server_info(self, *, timeout: float = TIMEOUT_S) -> generation_pb2.GetServerInfoResponse:
        info: generation_pb2.GetServerInfoResponse = await self._ask(
            self._stub.GetServerInfo, generation_pb2.GetServerInfoRequest(), timeout
        )
        return info

    async def close(self) -> None:
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _events(self, method: Starting[Q], request: Q, timeout: float) -> AsyncGenerator[Event, None]:
        stream = method(request, timeout=timeout)
        try:
            async for message in stream:
                yield event_from_wire(message)
        except grpc.RpcError as error:
            raise from_rpc(error, self.address, tls=self._tls) from None
        finally:
            stream.cancel()

    async def _ask(self, method: Unary[Q, A], request: Q, timeout: float) -> A:
        try:
            return await method(request, timeout=timeout)
        except grpc.RpcError as error:
            raise from_rpc(error, self.address, tls=self._tls) from None
