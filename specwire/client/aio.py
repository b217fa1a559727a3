"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
import grpc.aio
from google.protobuf.message import Message as ProtoMessage

from specwire.client.events import (
    Completion,
    Event,
    Finished,
    PartialCompletion,
    SessionState,
    SpecwireError,
    TextScore,
    closed,
    from_rpc,
)
from specwire.client.requests import (
    TIMEOUT_S,
    Chat,
    Message,
    Prompt,
    RequestOptions,
    Text,
    Tool,
    addresses_of,
    generate_request,
    request_id,
    score_request,
    single_options,
    watch_request,
)
from specwire.client.stream import (
    PATIENCE_S,
    Attempts,
    Request,
    Resumption,
    event_from_wire,
    scores_from_wire,
    session_from_wire,
)
from specwire.rpc.channel import READ_AHEAD_BYTES, open_channel
from specwire.rpc.tls import ClientTls
from specwire.telemetry.tracing import Side, begin, metadata_of
from specwire.v1 import generation_pb2, generation_pb2_grpc

# Seconds within which a session that is left early is cancelled.
FAREWELL_S = 2.0
# In the names of spans.
SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name

Stub = generation_pb2_grpc.GenerationServiceStub
T = TypeVar("T")
# A method of the stub, which has no types: a request and its timeout go in.
Unary = Callable[..., Awaitable[T]]


class Concurrency:
    """The running loop's clock and channels, and calls that run side by side in it."""

    def __init__(self) -> None:
        self._started: set[Any] = set()

    def open(self, address: str, tls: ClientTls | None, token: str) -> grpc.aio.Channel:
        return open_channel(address, tls, token, READ_AHEAD_BYTES)

    def now(self) -> float:
        """Seconds."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def gather(self, calls: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
        """What each returns, in their order. Where one raises, the others are cancelled."""
        tasks = [asyncio.ensure_future(call()) for call in calls]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def start(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run it beside the caller; `ended` waits for it."""
        task = asyncio.get_running_loop().create_task(call())
        self._started.add(task)
        task.add_done_callback(self._started.discard)

    async def ended(self) -> None:
        """Wait for everything that was started."""
        await asyncio.gather(*self._started, return_exceptions=True)


class _Endpoint:
    """One address."""

    def __init__(self, address: str, tls: ClientTls | None, channel: grpc.aio.Channel) -> None:
        self.address = address
        self._tls = tls is not None
        self.channel = channel
        self.stub = generation_pb2_grpc.GenerationServiceStub(channel)

    async def events(self, request: Request, timeout: float) -> AsyncGenerator[Event, None]:
        method = "Watch" if isinstance(request, generation_pb2.WatchRequest) else "Generate"
        span, problem = begin(f"{SERVICE}/{method}", Side.CLIENT), ""
        stream: Any = getattr(self.stub, method)(request, timeout=timeout, metadata=metadata_of(span))
        try:
            async for message in stream:
                yield event_from_wire(message)
        except grpc.RpcError as error:
            failure = from_rpc(error, self.address, tls=self._tls)
            problem = str(failure)
            raise failure from None
        finally:
            stream.cancel()
            span.end(problem)

    async def ask(self, method: Unary[T], request: ProtoMessage, timeout: float) -> T:
        try:
            return await method(request, timeout=timeout)
        except grpc.RpcError as error:
            raise from_rpc(error, self.address, tls=self._tls) from None


class AsyncClient:
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

    Methods raise SpecwireError. Make it in a running event loop; close it, or use it as a context manager.
    """

    # Another one where who calls waits in a thread (`specwire.client.blocking`).
    _concurrency: type[Concurrency] = Concurrency

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        tls: ClientTls | None = None,
        token: str = "",
        patience: float = PATIENCE_S,
    ) -> None:
        self._loop = self._concurrency()
        self._endpoints = [_Endpoint(each, tls, self._loop.open(each, tls, token)) for each in addresses_of(address)]
        self._current = 0
        self._answered = False
        self._patience = patience
        self._closed = False
        self._owned: set[Resumption] = set()

    @property
    def address(self) -> str:
        """Where it calls now."""
        return self._endpoints[self._current].address

    async def generate(
        self, prompt: Prompt, *, timeout: float = TIMEOUT_S, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[Event, None]:
        """Started, Chunks, Finished.

        Closing it early cancels, except with a request id of the caller: then it may come back. See
        `RequestOptions` for the options.
        """
        request = generate_request(prompt, **options)
        owned = not request.request_id
        if owned and self._patience:
            request.request_id = request_id()
        resumption, over = Resumption(request), False
        if owned:
            self._owned.add(resumption)
        try:
            async with aclosing(self._events(resumption, timeout)) as events:
                async for event in events:
                    over = isinstance(event, Finished)
                    yield event
            over = True
        except SpecwireError:
            over = True
            raise
        finally:
            self._owned.discard(resumption)
            if owned and not over:
                self._say_farewell(resumption)

    def continue_(
        self, session_id: str, prompt: Prompt, *, timeout: float = TIMEOUT_S, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[Event, None]:
        """`generate` a conversation's next turn: a new session, which adds `prompt` to all of one that has ended."""
        options["parent"] = session_id
        return self.generate(prompt, timeout=timeout, **options)

    async def complete(
        self, prompt: Prompt, *, timeout: float = TIMEOUT_S, **options: Unpack[RequestOptions]
    ) -> Completion:
        """The whole generation at once. A session that failed half-way has finish_reason ERROR and its message."""
        gathered = PartialCompletion()
        async for event in self.generate(prompt, timeout=timeout, **options):
            gathered.add(event)
        return gathered.completion()

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        timeout: float = TIMEOUT_S,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """The answer to a conversation: `content`, `reasoning` and `tool_calls` beside the text.

        Messages and tools are written as OpenAI's API has them. See `Chat`, which `generate` takes for a prompt where
        the answer is wanted as it comes: each Chunk has a delta.
        """
        chat = Chat(messages, tools, tool_choice=tool_choice, parallel_tool_calls=parallel_tool_calls)
        return await self.complete(chat, timeout=timeout, **options)

    async def complete_many(
        self, prompt: Prompt, n: int, *, timeout: float = TIMEOUT_S, **options: Unpack[RequestOptions]
    ) -> list[Completion]:
        """N completions of one prompt and seed, each a session of its own; that of choice i stands at i.

        Where one fails, so does the call, once the others have ended.
        """
        wanted = single_options(n, options)
        return await self._loop.gather([partial(self.complete, prompt, timeout=timeout, **each) for each in wanted])

    def watch(
        self, session_id: str, from_position: int = 0, *, prefix_hash: int | None = None, timeout: float = TIMEOUT_S
    ) -> AsyncGenerator[Event, None]:
        """Follow a session; 0 starts behind the prompt. Leaving early does not end it.

        prefix_hash: `specwire.core.text.hash_of` the text before from_position; a contradiction is DATA_LOSS.
        """
        return self._events(Resumption(watch_request(session_id, from_position, prefix_hash)), timeout)

    async def get_session(self, session_id: str, *, timeout: float = TIMEOUT_S) -> SessionState:
        request = generation_pb2.GetSessionRequest(session_id=session_id)
        return session_from_wire(await self._ask(lambda stub: stub.GetSession, request, timeout))

    async def cancel(self, session_id: str, *, timeout: float = TIMEOUT_S) -> None:
        """Tell a session to end; its stream says when it has."""
        request = generation_pb2.CancelRequest(session_id=session_id)
        await self._ask(lambda stub: stub.Cancel, request, timeout)

    async def delete_session(self, session_id: str, *, timeout: float = TIMEOUT_S) -> None:
        """Delete prompt and text at the service, for good; a running session ends first."""
        request = generation_pb2.DeleteSessionRequest(session_id=session_id)
        await self._ask(lambda stub: stub.DeleteSession, request, timeout)

    async def server_info(self, *, timeout: float = TIMEOUT_S) -> generation_pb2.GetServerInfoResponse:
        request = generation_pb2.GetServerInfoRequest()
        info: generation_pb2.GetServerInfoResponse = await self._ask(lambda stub: stub.GetServerInfo, request, timeout)
        return info

    async def score_text(
        self, prefix: Text, continuations: Sequence[Sequence[Text]], *, model: str = "", timeout: float = TIMEOUT_S
    ) -> list[TextScore]:
        """How probable the target finds each continuation of `prefix`; nothing is generated.

        A continuation is a sequence of parts, text or token ids, each of which is encoded by itself. The prefix is
        computed once for all of them: up to 64. model: as of `RequestOptions`.
        """
        request = score_request(prefix, continuations, model)
        scores = await self._ask(lambda stub: stub.ScoreText, request, timeout)
        return scores_from_wire(scores, len(request.continuations))

    async def close(self) -> None:
        """End what still streams, and the connections."""
        for resumption in list(self._owned):
            self._say_farewell(resumption)
        self._closed = True
        await self._loop.ended()
        for endpoint in self._endpoints:
            await endpoint.channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _events(self, resumption: Resumption, timeout: float) -> AsyncGenerator[Event, None]:
        attempts = self._attempts(timeout)
        while True:
            endpoint = self._endpoints[attempts.current]
            try:
                async with aclosing(endpoint.events(resumption.request, attempts.left(self._loop.now()))) as events:
                    async for event in events:
                        shown = resumption.take(event)
                        self._heard(attempts, shown is not None)
                        if shown is not None:
                            yield shown
                        if isinstance(event, Finished):
                            break
                return
            except SpecwireError as error:
                if self._closed:
                    raise
                resumption.broke(error, self._patience)
                wait = attempts.after(error, self._loop.now())
            await self._pause(wait)

    async def _ask(self, method: Callable[[Stub], Unary[T]], request: ProtoMessage, timeout: float) -> T:
        attempts = self._attempts(timeout)
        while True:
            endpoint = self._endpoints[attempts.current]
            try:
                answer = await endpoint.ask(method(endpoint.stub), request, attempts.left(self._loop.now()))
            except SpecwireError as error:
                if self._closed:
                    raise
                wait = attempts.after(error, self._loop.now())
            else:
                self._heard(attempts, True)
                return answer
            await self._pause(wait)

    async def _pause(self, seconds: float) -> None:
        await self._loop.sleep(seconds)
        if self._closed:
            raise closed()

    def _attempts(self, timeout: float) -> Attempts:
        deadline = self._loop.now() + timeout
        return Attempts(len(self._endpoints), self._current, deadline, self._patience, self._answered)

    def _heard(self, attempts: Attempts, news: bool) -> None:
        attempts.heard(self._loop.now, news)
        self._current, self._answered = attempts.current, True

    def _say_farewell(self, resumption: Resumption) -> None:
        """Cancel a session that its reader has left. If this is lost, the service waits a while for its return."""
        if resumption.session_id and not self._closed:
            self._loop.start(partial(self._cancel_quietly, resumption.session_id))

    async def _cancel_quietly(self, session_id: str) -> None:
        with suppress(SpecwireError):
            await self.cancel(session_id, timeout=FAREWELL_S)
