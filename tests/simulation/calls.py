"""gRPC's asyncio surface, as far as the project uses it, over the simulated network: channels, calls and contexts.

Calls promise what gRPC's do: messages of one direction arrive in order or not at all; a lost call ends with UNAVAILABLE
at the client and by cancellation at the server; an end that does not read stops the other from writing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import suppress
from contextvars import Context, copy_context
from typing import Any, NoReturn

import grpc
import grpc.aio

from specwire.rpc.keys import show
from tests.simulation.loop import SimLoop, current_process
from tests.simulation.network import UNREACHABLE_AFTER, Breakable, Line, Listening, Network, broken, failure

Metadata = tuple[tuple[str, str], ...]
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined] # the stubs lack it
# Messages that may be under way or unread in one direction.
WINDOW = 8


class Pipe:
    """One direction of a call. `read` belongs to one strand, `write` to another.

    Invariant: once `error` is set nothing more arrives.
    """

    def __init__(self, loop: SimLoop, line: Line, target: Context) -> None:
        self._loop = loop
        self._line = line
        self._target = target
        self._arrived: deque[Any] = deque()
        self._under_way = 0
        self._last = self.held_until = 0.0
        self.error: BaseException | None = None
        self._refusal: BaseException | None = None
        self._changed: list[asyncio.Future[None]] = []

    async def write(self, item: Any) -> None:
        while self._refusal is None and self._under_way + len(self._arrived) >= WINDOW:
            await self._change()
        if self._refusal is not None:
            raise self._refusal
        self.push(item)

    def push(self, item: Any) -> None:
        self._last = max(self._last + 1e-9, self.held_until, self._line.arrival(self._loop.time()))
        self._under_way += 1
        self._loop.call_at(self._last, self._arrive, item, context=self._target)

    def _arrive(self, item: Any) -> None:
        self._under_way -= 1
        if self.error is None:
            self._arrived.append(item)
        self._wake()

    async def read(self) -> Any:
        while not self._arrived:
            if self.error is not None:
                raise self.error
            await self._change()
        item = self._arrived.popleft()
        self._wake()
        if isinstance(item, BaseException):
            self.error = self._refusal = item
            raise item
        return item

    def fail(self, reader: BaseException, writer: BaseException) -> None:
        """What has arrived may still be read; nothing more comes."""
        if self.error is None:
            self.error, self._refusal = reader, writer
        self._wake()

    def refuse(self, writer: BaseException) -> None:
        """Nothing more can be written; what was may still arrive."""
        self._refusal = self._refusal or writer
        self._wake()

    async def _change(self) -> None:
        changed = self._loop.create_future()
        self._changed.append(changed)
        await changed

    def _wake(self) -> None:
        waiting, self._changed = self._changed, []
        for each in waiting:
            if not each.done():
                each.set_result(None)


class Call(Breakable):
    """One RPC: two pipes and a handler's task at the server. Also what the stub's caller holds."""

    def __init__(
        self,
        network: Network,
        address: str,
        path: str,
        codec: Codec,
        timeout: float | None = None,
        metadata: Metadata = (),
    ) -> None:
        self._network, self._loop = network, network.loop
        self._metadata = metadata
        self._address, self._path, self._codec = address, path, codec
        self._client = copy_context()
        self._process = current_process()
        self._connected: asyncio.Future[None] = self._loop.create_future()
        self._deadline = None if timeout is None else self._loop.time() + timeout
        self._cancelled = False
        self._task: asyncio.Task[None] | None = None
        self._listening = network.listening.get(address)
        server = address if self._listening is None else self._listening.process
        self._line = network.line(self._process, server)
        self.down = Pipe(self._loop, self._line, self._client)
        self.up = Pipe(self._loop, self._line, self._client if self._listening is None else self._listening.context)
        if timeout is not None:
            self._loop.call_later(timeout, self._expire)
        self._connect()

    def _connect(self) -> None:
        now = self._loop.time()
        if self._listening is None or self._line.closed_until > now:
            after = UNREACHABLE_AFTER if self._line.closed_until > now else self._line.arrival(now) - now
            self._loop.call_later(after, self._fail_client, unreachable(self._address))
            return
        self._line.calls[self] = None
        self._loop.call_at(self._line.arrival(now), self._accept, self._listening, context=self._listening.context)

    # At the server

    def _accept(self, listening: Listening) -> None:
        if self.up.error is not None:
            return
        context = ServerContext(self, self._process, self._deadline, self._metadata)
        self._network.served[self] = None
        self._task = self._loop.create_task(self._serve(listening.handlers.get(self._path), context))
        self._loop.call_at(self._line.arrival(self._loop.time()), self._confirm, context=self._client)

    async def _serve(self, handler: Any, context: ServerContext) -> None:
        """End the call with a status, whatever the handler does."""
        try:
            if handler is None:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"no method {self._path}")
            await self._handle(handler, context)
            self._say(EOF)
        except grpc.aio.AbortError:
            self._say(context.status)
        finally:
            self.up.fail(asyncio.CancelledError(), broken())
            self._line.calls.pop(self, None)
            self._network.served.pop(self, None)

    async def _handle(self, handler: Any, context: ServerContext) -> None:
        requests = self._requests(handler)
        if handler.request_streaming:
            await handler.stream_stream(requests, context)
            return
        request = await anext(requests)
        if not handler.response_streaming:
            await context.write(await handler.unary_unary(request, context))
            return
        async for response in handler.unary_stream(request, context):
            await context.write(response)

    async def _requests(self, handler: Any) -> AsyncIterator[Any]:
        while (data := await self.up.read()) is not EOF:
            yield self._line.mangle(handler.request_deserializer(data))

    def _say(self, last: Any) -> None:
        if self.down.error is None:
            self.down.push(last)

    # At the client

    def _confirm(self) -> None:
        if not self._connected.done():
            self._connected.set_result(None)

    def _fail_client(self, error: BaseException) -> None:
        self.down.fail(error, asyncio.CancelledError())
        self.up.refuse(error)
        if not self._connected.done():
            self._connected.set_exception(error)
            self._connected.exception()  # whoever waits gets it; nobody may

    def _expire(self) -> None:
        self._fail_client(failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))
        self._end_server(0.0)

    def _end_server(self, after: float) -> None:
        self._line.calls.pop(self, None)
        if self._listening is not None:
            self._loop.call_later(after, self._cancel_server, context=self._listening.context)

    def _cancel_server(self) -> None:
        self.up.fail(asyncio.CancelledError(), broken())
        self.down.refuse(asyncio.CancelledError())
        if self._task is not None:
            self._task.cancel()

    def lose(self, client_in: float, server_in: float) -> None:
        self._line.calls.pop(self, None)
        self._loop.call_later(client_in, self._fail_client, broken(), context=self._client)
        self._end_server(server_in)

    def hold(self, until: float) -> None:
        """What the client says from now on does not arrive before."""
        self.up.held_until = until

    def served_by(self, process: str) -> bool:
        return self._listening is not None and self._listening.process == process

    # What grpc.aio's calls offer

    async def wait_for_connection(self) -> None:
        await asyncio.shield(self._connected)

    async def write(self, message: Any) -> None:
        if self._cancelled:
            raise asyncio.CancelledError
        await self.up.write(self._codec.encode(message))

    async def done_writing(self) -> None:
        await self.up.write(EOF)

    async def read(self) -> Any:
        if self._cancelled:
            raise asyncio.CancelledError
        data = await self.down.read()
        return data if data is EOF else self._line.mangle(self._codec.decode(data))

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is EOF:
            raise StopAsyncIteration
        return message

    def cancel(self) -> bool:
        """The client's own doing: its reads and writes are cancelled, the server hears of it."""
        if self._cancelled or self.down.error is not None:
            return False
        self._cancelled = True
        self._fail_client(asyncio.CancelledError())
        self._end_server(self._line.arrival(self._loop.time()) - self._loop.time())
        return True

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        """Of a unary call."""
        answer = await self.read()
        with suppress(grpc.aio.AioRpcError):
            await self.read()
        return answer


def unreachable(address: str) -> grpc.aio.AioRpcError:
    return failure(grpc.StatusCode.UNAVAILABLE, f"failed to connect to all addresses; last error: {address}")


class Codec:
    """Encodes requests and decodes responses: parties share no objects."""

    def __init__(self, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> None:
        self.encode = encode
        self.decode = decode


class ServerContext:
    """grpc.aio.ServicerContext, as far as the services ask."""

    def __init__(self, call: Call, client: str, deadline: float | None, metadata: Metadata) -> None:
        self._call = call
        self._client = client
        self._deadline = deadline
        self._metadata = metadata
        self.status: BaseException = broken()

    async def write(self, message: Any) -> None:
        await self._call.down.write(message.SerializeToString())

    async def abort(self, code: grpc.StatusCode, details: str = "", trailers: Any = ()) -> NoReturn:
        self.status = failure(code, details, trailers)
        raise grpc.aio.AbortError

    def peer(self) -> str:
        return f"sim:{self._client}"

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - asyncio.get_running_loop().time())

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def peer_identities(self) -> None:
        return None


class Channel:
    """grpc.aio.Channel to one address; the stubs' calls on it, each of which shows `token`."""

    def __init__(self, network: Network, address: str, token: str = "") -> None:
        self._network = network
        self._address = address
        self._shown = show(token)
        self._calls: list[Call] = []

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for call in self._calls:
            call.cancel()

    def stream_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Call]:
        codec = Codec(request_serializer, response_deserializer)
        return lambda timeout=None, metadata=(), **_: self._start(path, codec, timeout, metadata)

    def unary_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Call]:
        codec = Codec(request_serializer, response_deserializer)
        return lambda request, timeout=None, metadata=(), **_: self._ask(path, codec, request, timeout, metadata)

    unary_unary = unary_stream

    def _ask(self, path: str, codec: Codec, request: Any, timeout: float | None, metadata: Any) -> Call:
        call = self._start(path, codec, timeout, metadata)
        call.up.push(codec.encode(request))
        return call

    def _start(self, path: str, codec: Codec, timeout: float | None, metadata: Any) -> Call:
        shown = (*(metadata or ()), *self._shown)
        call = Call(self._network, self._address, path, codec, timeout, shown)
        self._calls.append(call)
        return call
