"""Sending on one long-lived stream: parts of one loop tick go out as one message."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

# A merged message stays well below the cap of options.MOST_MESSAGE_BYTES.
MERGE_BYTES = 4 * 1024 * 1024
MOST_QUEUED_BYTES = 64 * 1024 * 1024


class LinkError(Exception):
    """The stream is unusable: it broke, or the peer does not read."""


class Outbox(Generic[M]):
    """Owns the writing side of a stream, client's (`call.write`) or server's (`context.write`).

    `push` is synchronous and never blocks. The writer task wakes in the next iteration of the event loop, so that parts
    pushed within one iteration leave together; parts pushed during a write leave together after it. Order is kept:
    repeated fields are concatenated, of a single field (a step's timings) the later part's values win.

    Invariant: `_sizes` are the encoded sizes of the messages in `_queue`; together at most `most_queued` bytes.

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
        self._write = write
        self._on_failure = on_failure
        self._stall_s = stall_s
        self._most_queued = most_queued
        self._queue: deque[M] = deque()
        self._sizes: deque[int] = deque()
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] = self._loop.create_future()
        self._failed: LinkError | None = None
        self._closing = False
        self._task = self._loop.create_task(self._run(), name="outbox")

    @property
    def queued(self) -> int:
        """Bytes that wait to be sent."""
        return sum(self._sizes)

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
        if self._queue and self._sizes[-1] + size <= MERGE_BYTES:
            self._queue[-1].MergeFrom(part)
            self._sizes[-1] += size
        else:
            self._queue.append(part)
            self._sizes.append(size)
        self._signal()

    async def close(self, flush_s: float = 1.0) -> None:
        """Send what is queued within `flush_s` seconds, then end the writer task. Idempotent."""
        self._closing = True
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
            if not self._queue:
                self._wake = self._loop.create_future()
                await self._wake
                continue
            self._sizes.popleft()
            await self._send(self._queue.popleft())

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
        self._failed = error
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
