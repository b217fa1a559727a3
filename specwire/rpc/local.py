"""Calls within this process: gRPC's asyncio surface, as far as links use it, without a socket and without bytes.

Calls promise what gRPC's do. Messages of one direction arrive in order, and an end that does not read stops the other
from writing. What a handler raises ends its call with the status that `specwire.rpc.errors` says. A call that its
client cancels, or whose time is over, is cancelled at its handler.

Messages are handed over as they are: who has written one must not touch it any more. What a unary call answers is
copied, because a service may keep it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import Any, NoReturn, cast

import grpc
import grpc.aio

from specwire.rpc.errors import Handler, Metadata, told_of

# Messages of one direction that may be unread; a sender merges what waits (`specwire.rpc.link`).
MOST_UNREAD = 8
STOPPED = "the service has stopped"


def failure(code: grpc.StatusCode, details: str, trailers: Metadata = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details, None)


class Pipe:
    """One direction of a call, with one reader, who iterates over it, and one writer. Of these at most one waits.

    Invariant: once it has ended nothing more is written; what was written before may still be read.
    """

    def __init__(self) -> None:
        self._messages: deque[Any] = deque()
        self._end: BaseException | None = None
        self._refusal: BaseException | None = None
        self._changed = asyncio.Event()

    async def write(self, message: Any) -> None:
        while self._refusal is None and len(self._messages) >= MOST_UNREAD:
            self._changed.clear()
            await self._changed.wait()
        if self._refusal is not None:
            raise self._refusal
        self._messages.append(message)
        self._changed.set()

    def __aiter__(self) -> Pipe:
        return self

    async def __anext__(self) -> Any:
        while not self._messages:
            if self._end is not None:
                raise self._end
            self._changed.clear()
            await self._changed.wait()
        message = self._messages.popleft()
        self._changed.set()
        return message

    def end(self, reader: BaseException, writer: BaseException) -> None:
        """What each of the two gets from now on, the reader once it has read all. Void if it has ended."""
        if self._end is None:
            self._end, self._refusal = reader, writer
            self._changed.set()

    def cut(self, error: BaseException) -> None:
        """As `end` for both, and nothing more is read."""
        self._messages.clear()
        self._end = self._refusal = error
        self._changed.set()


class LocalCall:
    """What a stub's method gives, as grpc.aio has it: a call under way, whose handler runs in a task of the server's.

    write: as of a stream's call.
    """

    def __init__(self, server: LocalServer, method: str, timeout: float | None, request: Any = None) -> None:
        self.down, self._up = Pipe(), Pipe()
        self.write = self._up.write
        self._request = request
        loop = asyncio.get_running_loop()
        self.deadline = None if timeout is None else loop.time() + timeout
        self._timer = None if timeout is None else loop.call_later(timeout, self._expire)
        self._status = failure(grpc.StatusCode.UNAVAILABLE, STOPPED)
        self._task = server.run(self._serve(server.handlers.get(method), method, server.stopped))
        self._task.add_done_callback(self._ended)

    # At the service

    async def _serve(self, handler: Handler | None, method: str, stopped: bool) -> None:
        """Run the handler; what becomes of it is the call's status."""
        context = LocalContext(self)
        try:
            if handler is None:
                self._status = failure(grpc.StatusCode.UNIMPLEMENTED, f"there is no method {method}")
            elif not stopped:
                await self._handle(handler, context)
                self._status = failure(grpc.StatusCode.INTERNAL, "the call is over")
                self.down.end(StopAsyncIteration(), self._status)
        except grpc.aio.AbortError:
            self._status = context.status
        except Exception as raised:  # the policy says what the caller is told
            self._status = failure(*told_of(raised, method))

    def _ended(self, _: asyncio.Task[None]) -> None:
        """Also of a task that was cancelled before it began."""
        self.down.end(self._status, self._status)
        self._up.end(self._status, self._status)
        if self._timer is not None:
            self._timer.cancel()

    async def _handle(self, handler: Handler, context: LocalContext) -> None:
        if handler.request_streaming:
            await cast(Any, handler.stream_stream)(self._up, context)
            return
        answer = await cast(Any, handler.unary_unary)(self._request, context)
        copy = type(answer)()
        copy.CopyFrom(answer)
        await self.down.write(copy)

    # At the client

    @property
    def over(self) -> bool:
        return self._task.done()

    async def wait_for_connection(self) -> None:
        """There is nothing to wait for."""

    async def done_writing(self) -> None:
        self._up.end(StopAsyncIteration(), failure(grpc.StatusCode.INTERNAL, "nothing more was to be written"))

    def __aiter__(self) -> Pipe:
        return self.down

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        try:
            return await anext(self.down)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def cancel(self) -> bool:
        """The client leaves: its reads and writes are cancelled, and so is the handler."""
        return self._leave(asyncio.CancelledError())

    def _expire(self) -> None:
        self._leave(failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _leave(self, error: BaseException) -> bool:
        if self._task.done():
            return False
        self.down.cut(error)
        self._up.cut(error)
        return self._task.cancel()


class LocalContext:
    """grpc.aio.ServicerContext, as far as the services ask."""

    def __init__(self, call: LocalCall) -> None:
        self._call = call
        self.write = call.down.write
        self.status = failure(grpc.StatusCode.UNKNOWN, "")

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        self.status = failure(code, details, trailing_metadata)
        raise grpc.aio.AbortError

    def time_remaining(self) -> float | None:
        deadline = self._call.deadline
        return None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())

    def peer(self) -> str:
        return "this process"

    def invocation_metadata(self) -> Metadata:
        return ()

    def auth_context(self) -> Mapping[str, list[bytes]]:
        return {}


class LocalServer:
    """What the generated add_..._to_server functions add a service to. Owns the calls to it.

    `handlers`: by method. `stopped`: it takes no more calls.
    """

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self.stopped = False
        self._running: set[asyncio.Task[None]] = set()

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The registered ones are all that is asked for."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        self.handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    def run(self, call: Any) -> asyncio.Task[None]:
        """Have a call's handler run."""
        task: asyncio.Task[None] = asyncio.create_task(call, name="local call")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def channel(self) -> grpc.aio.Channel:
        return cast(grpc.aio.Channel, LocalChannel(self))

    async def stop(self) -> None:
        """End the calls that run, with UNAVAILABLE, and refuse others. Idempotent."""
        self.stopped = True
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class LocalChannel:
    """grpc.aio.Channel to one server; the calls on it end with it."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self._calls: list[LocalCall] = []

    async def __aenter__(self) -> LocalChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for call in self._calls:
            call.cancel()
        self._calls.clear()

    def stream_stream(self, method: str, *_: object, **__: object) -> Callable[..., LocalCall]:
        return lambda timeout=None, **_: self._begin(method, timeout)

    def unary_unary(self, method: str, *_: object, **__: object) -> Callable[..., LocalCall]:
        return lambda request, timeout=None, **_: self._begin(method, timeout, request)

    def _begin(self, method: str, timeout: float | None, request: Any = None) -> LocalCall:
        self._calls = [call for call in self._calls if not call.over]
        call = LocalCall(self._server, method, timeout, request)
        self._calls.append(call)
        return call
