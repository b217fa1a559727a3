"""One long-lived stream between two processes: what goes out on it, and how the end that dialled keeps it up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from specwire.core.invalid import InvalidParameter
from specwire.rpc.channel import Backoff, distrust, immediate, open_peer_channel, unreachable
from specwire.rpc.decoding import SMALL_BYTES, portions
from specwire.rpc.errors import ReadableStream, readable
from specwire.rpc.keys import Token
from specwire.rpc.tls import ClientTls
from specwire.v1 import common_pb2

# ----------------------------------------------------------------------------------------------------------------------
# Sending: parts of one loop tick go out as one message.

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

# What is merged stays so small that it cannot have more parts than a message may have.
MERGE_BYTES = SMALL_BYTES
MOST_QUEUED_BYTES = 64 * 1024 * 1024


class LinkError(Exception):
    """The stream is unusable: it broke, or the peer does not read."""


class Outbox(Generic[M]):
    """Owns the writing side of a stream, client's (`call.write`) or server's (`context.write`).

    `push` is synchronous and never blocks. The writer task wakes in the next iteration of the event loop, so that parts
    pushed within one iteration leave together; parts pushed during a write leave together after it. Order is kept:
    repeated fields are concatenated, of a single field (a step's timings) the later part's values win.

    What can wait, `push_later`, is made and sent one part at a time, each while nothing else is queued. So it takes
    neither the queue's room nor the time of others, however much it is and however slow the line.

    `queued`: bytes that wait to be sent.

    Invariant: `_sizes` are the encoded sizes of the messages in `_queue`; together `queued`, at most `most_queued`.

    Args:
        write: sends one message; waits while the peer's flow control is exhausted.
        on_failure: told once, from the loop, when the link is lost; nothing is written afterwards. Not on `close`.
        stall_s: how long one write may wait for the peer to read.
    """

    def __init__(
        self,
        write: Callable[[M], Awaitable[None]],
        on_failure: Callable[[LinkError], None],
        *,
        stall_s: float = 10.0,
        most_queued: int = MOST_QUEUED_BYTES,
    ) -> None:
        self.queued = 0
        self._write = write
        self._on_failure = on_failure
        self._stall_s = stall_s
        self._most_queued = most_queued
        self._queue: deque[M] = deque()
        self._sizes: deque[int] = deque()
        self._later: deque[Iterator[M]] = deque()
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] = self._loop.create_future()
        self._failed: LinkError | None = None
        self._closing = False
        self._task = self._loop.create_task(self._run(), name="outbox")

    @property
    def failed(self) -> LinkError | None:
        """Why the link was lost, if it was."""
        return self._failed

    def push(self, part: M) -> None:
        """Send `part`, which belongs to the outbox from now on. After a failure or `close` it is dropped."""
        if self._failed or self._closing:
            return
        size = part.ByteSize()
        if self.queued + size > self._most_queued:
            self._fail(LinkError(f"the peer does not read: more than {self._most_queued} bytes are queued for it"))
            self._task.cancel()
            return
        self.queued += size
        if self._queue and self._sizes[-1] + size <= MERGE_BYTES:
            self._queue[-1].MergeFrom(part)
            self._sizes[-1] += size
        else:
            self._queue.append(part)
            self._sizes.append(size)
        self._signal()

    def push_later(self, parts: Iterator[M]) -> None:
        """Send `parts`, each well below a message's cap, in turn with other such; void after a failure or `close`."""
        if not self._failed and not self._closing:
            self._later.append(parts)
            self._signal()

    async def close(self, flush_s: float = 1.0) -> None:
        """Send what is queued within `flush_s` seconds, then end the writer task. Idempotent."""
        self._closing = True
        self._later.clear()
        self._signal()
        done, _ = await asyncio.wait([self._task], timeout=flush_s)
        if not done:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _signal(self) -> None:
        if not self._wake.done():
            self._wake.set_result(None)

    async def _run(self) -> None:
        while not self._failed and (self._queue or not self._closing):
            if not self._queue and self._later:
                await self._send_later(self._later.popleft())
                continue
            if not self._queue:
                self._wake = self._loop.create_future()
                await self._wake
                continue
            self.queued -= self._sizes.popleft()
            await self._send(self._queue.popleft())

    async def _send_later(self, parts: Iterator[M]) -> None:
        try:
            part = next(parts, None)
        except Exception:  # a bug of ours: what else is to be sent goes on
            logger.exception("parts that could wait failed")
            return
        if part is None:
            return
        self._later.append(parts)
        await self._send(part)
        await asyncio.sleep(0)  # also where a write never waits, others are served between two parts

    async def _send(self, message: M) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._write(message)
        except TimeoutError:
            self._fail(LinkError(f"the peer did not read for {self._stall_s:g} s"))
        except asyncio.CancelledError:
            if _cancelled_by_us():
                raise
            self._fail(LinkError("the stream was cancelled"))
        except Exception as error:  # whatever write raises, the stream cannot be used any more
            self._fail(LinkError(f"the stream broke: {_sentence(error)}"))

    def _fail(self, error: LinkError) -> None:
        if self._failed or self._closing:
            self._failed = self._failed or error
            return
        self._failed, self.queued = error, 0
        self._later.clear()
        self._queue.clear()
        self._sizes.clear()
        self._on_failure(error)


def _cancelled_by_us() -> bool:
    """Whether our task was cancelled. gRPC also raises CancelledError from writes of a call that was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _sentence(error: Exception) -> str:
    details = getattr(error, "details", None)
    text = details() if callable(details) else str(error)
    return text or type(error).__name__


# ----------------------------------------------------------------------------------------------------------------------
# One Connect stream to one peer, kept up: connect, read, and after a failure connect again with backoff.

Info = common_pb2.GetModelInfoResponse
Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
Heard = TypeVar("Heard", contravariant=True)
Told = TypeVar("Told", contravariant=True)

# Opens a channel to a peer in this process.
LocalPeer = Callable[[], grpc.aio.Channel]
ALL_ELSEWHERE: Mapping[str, LocalPeer] = {}

FIRST_BACKOFF = 0.05
MOST_BACKOFF = 1.0
# To connect, and to get the peer's description: a large tokenizer over a slow line.
CONNECT_TIMEOUT = 60.0
# After `cut`.
QUARANTINE = 60.0
# Seconds between measurements of the round trip, and of how many the least counts: a line that becomes longer is
# believed once all of them say so, a shorter one at once.
GAUGE_EVERY = 5.0
GAUGED = 4


class KeptTokenizers(Protocol):
    """Keeps the tokenizers of peers. `latest`: the hash of the one that was read last; "" before any was."""

    latest: str

    async def take(self, info: Info) -> None:
        """Take the tokenizer out of a description."""
        ...


class Listener(Protocol[Heard]):
    """Hears what happens on a link; called on the event loop, must not block."""

    def on_up(self, info: Info) -> None: ...
    def on_message(self, message: Heard) -> None: ...
    def on_down(self) -> None: ...
    def on_unreachable(self) -> None: ...


class Line(Protocol[Told]):
    """The connection to a peer, whichever end dialled."""

    @property
    def address(self) -> str:
        """Which peer this is, for people."""
        ...

    @property
    def up(self) -> bool: ...

    def send(self, part: Told) -> None:
        """Stage a part of this tick's message; void while the line is down."""
        ...

    def cut(self, reason: str) -> None:
        """End the connection with a harmful peer; it gets no other one for a while."""
        ...


class Link(Generic[Request, Response]):
    """Owned by its orchestrator: `run` ends only by cancellation.

    Args:
        stub: of the peer's service, which has Connect and GetModelInfo.
        tls: how to encrypt; None speaks plaintext.
        token: shown to the peer. Both are taken anew, as their files have become, at each connection.
        tokenizers: keeps the peer's tokenizer; None where it is not needed.
        local: opens a channel to a peer in this process, which is not dialled.

    `channel`: for calls beside the stream; None while the link is down.
    `round_trip_us`: to the peer and back, the least of the latest measurements; 0 before the link was ever up.
    `trouble`: why it is down, one sentence. `distrusted`: it is down because the two ends do not trust each other,
    which seldom passes by itself.

    Invariant: `up` holds exactly between on_up and on_down.
    """

    def __init__(
        self,
        address: str,
        stub: Callable[[grpc.aio.Channel], Any],
        tls: ClientTls | None = None,
        token: Token | str = "",
        tokenizers: KeptTokenizers | None = None,
        local: LocalPeer | None = None,
    ) -> None:
        self.address = address
        self._local = local
        self.trouble = f"{address} does not answer"
        self.distrusted = False
        self._trips_us: deque[float] = deque(maxlen=GAUGED)
        self._tls = tls
        self._token = token
        self._stub = stub
        self._tokenizers = tokenizers
        self._tokenizer_hash = ""
        self._outbox: Outbox[Request] | None = None
        self.channel: grpc.aio.Channel | None = None
        self._break: Callable[[LinkError], None] = lambda _: None
        self._was_cut = False
        self._told = False  # operators, that it is down

    @property
    def up(self) -> bool:
        return self._outbox is not None

    @property
    def round_trip_us(self) -> float:
        return min(self._trips_us, default=0.0)

    @property
    def queued(self) -> int:
        """Bytes that wait to be sent."""
        return 0 if self._outbox is None else self._outbox.queued

    def send(self, part: Request) -> None:
        """Stage a part of this tick's message; void while the link is down, as on_down has said."""
        if self._outbox is not None:
            self._outbox.push(part)

    def send_later(self, parts: Iterator[Request]) -> None:
        """See Outbox.push_later; void while the link is down."""
        if self._outbox is not None:
            self._outbox.push_later(parts)

    def cut(self, reason: str) -> None:
        """End the connection with a harmful peer; it is not dialled again for a while."""
        self._was_cut = True
        self._break(LinkError(reason))

    async def run(self, listener: Listener[Response]) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        backoff = Backoff(FIRST_BACKOFF, MOST_BACKOFF)
        while True:
            began, self._was_cut = loop.time(), False
            try:
                was_up, reason = await self._connect_once(listener)
            except Exception as error:  # a bug of ours: only the sessions on this link are lost
                logger.exception("link to %s failed", self.address)
                was_up, reason = True, describe(error)
            if task is not None and task.cancelling():  # gRPC keeps one that comes while a call begins to itself
                raise asyncio.CancelledError
            if was_up:
                logger.warning("link to %s lost: %s", self.address, reason)
                self._told = True
            elif reason != self.trouble:
                logger.warning("no link to %s: %s", self.address, reason)
                self._told = True
            self.trouble = reason
            if not was_up:
                listener.on_unreachable()
            wait = backoff.next(loop.time() - began if was_up else 0.0)
            await asyncio.sleep(QUARANTINE if self._was_cut else wait)

    async def _connect_once(self, listener: Listener[Response]) -> tuple[bool, str]:
        """One connection from start to end; returns whether it was ever up, and why it ended."""
        async with self._open() as channel:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    await self._ask(channel)  # also sets the connection up, so that the second time measures the line
                    self._trips_us.clear()
                call = self._stub(channel).Connect()
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    await call.wait_for_connection()
                    # As long as the stream lives, this process answers, and not a predecessor at its address.
                    info = await self._gauged(channel)
            except (grpc.RpcError, TimeoutError) as error:
                return False, self._why(error)
            except InvalidParameter as error:
                return False, self._unreadable(error)
            self.distrusted = False
            gauging = asyncio.create_task(self._gauge(channel), name=f"gauge of {self.address}")
            try:
                self.channel = channel
                return True, await self._converse(call, info, listener)
            finally:
                self.channel = None
                gauging.cancel()
                await asyncio.gather(gauging, return_exceptions=True)

    def _open(self) -> grpc.aio.Channel:
        return open_peer_channel(self.address, self._tls, self._token) if self._local is None else self._local()

    def _why(self, error: Exception) -> str:
        """Why there is no connection; keeps `distrusted`."""
        details = (error.details() or "") if isinstance(error, grpc.aio.AioRpcError) else ""
        self.distrusted = distrust(details, self.address) is not None
        if isinstance(error, TimeoutError):
            return f"{self.address} did not answer within {CONNECT_TIMEOUT:g} s"
        return unreachable(details, self.address, tls=self._tls is not None) or describe(error)

    def _unreadable(self, error: InvalidParameter) -> str:
        """Why the peer is left alone for a while."""
        self._was_cut = True
        return f"what {self.address} sent cannot be taken: {error}"

    async def _ask(self, channel: grpc.aio.Channel) -> Info:
        """The peer's description, without its tokenizer, which is kept once for all peers that have it."""
        latest = self._tokenizers.latest if self._tokenizers is not None else ""
        known = self._tokenizer_hash or latest
        request = common_pb2.GetModelInfoRequest(known_tokenizer_hash=known)
        info: Info = await readable(await self._stub(channel).GetModelInfo(request))
        if self._tokenizers is not None:
            await self._tokenizers.take(info)
        info.ClearField("tokenizer_json")
        self._tokenizer_hash = info.tokenizer_hash
        return info

    async def _gauged(self, channel: grpc.aio.Channel) -> Info:
        asked = time.monotonic_ns()
        info = await self._ask(channel)
        self._trips_us.append((time.monotonic_ns() - asked) / 1000)
        return info

    async def _gauge(self, channel: grpc.aio.Channel) -> None:
        """Measure the round trip repeatedly: an edge box moves, and the credit that it needs changes with it."""
        while True:
            await asyncio.sleep(GAUGE_EVERY)
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    await self._gauged(channel)
            except (grpc.RpcError, TimeoutError):
                continue  # the stream tells whether the link is alive
            except Exception:  # a bug of ours: sessions go on with the credit of the last measurement
                logger.exception("the round trip to %s could not be measured", self.address)

    async def _converse(
        self, call: grpc.aio.StreamStreamCall[Request, Response], info: Info, listener: Listener[Response]
    ) -> str:
        broken: list[LinkError] = []
        ending = _FirstStatus(call)

        def on_failure(error: LinkError) -> None:
            broken.append(error)
            call.cancel()

        outbox: Outbox[Request] = Outbox(call.write, on_failure)
        self._outbox, self._break = outbox, on_failure
        try:
            if self._told:
                logger.warning("link to %s is there again", self.address)
            self._told = False
            listener.on_up(info)
            async for message in ReadableStream(aiter(call)):
                for portion in portions(message):
                    listener.on_message(portion)
                    if portion is not message:
                        await asyncio.sleep(0)
                    if broken:
                        break  # the listener has cut the peer off
            return "the peer closed the stream"
        except InvalidParameter as error:
            return self._unreadable(error)
        except grpc.RpcError as error:
            return ending.told or describe(error)
        except asyncio.CancelledError:  # of the call, or of this task: see `run`
            return str(broken[0]) if broken else "the stream was cancelled"
        finally:
            self._outbox, self._break = None, lambda _: None
            try:
                listener.on_down()
            finally:
                await outbox.close(flush_s=0.2)
                call.cancel()


class _FirstStatus:
    """The status of a call as it is told first. A write that meets the end has gRPC put an INTERNAL of its own there.

    A call within this process keeps to what is told first: `told` stays "".
    """

    def __init__(self, call: object) -> None:
        self.told = ""
        if isinstance(call, grpc.aio.Call):
            call.add_done_callback(self._note)

    def _note(self, call: grpc.aio.Call) -> None:
        if not self.told:
            self.told = f"{immediate(call.code()).name}: {immediate(call.details())}"


def describe(error: BaseException) -> str:
    """One line on why a call failed."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
