"""Where the two clients differ: each name that `aio.py` takes from here has a pair, which `blocking.py` takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Thread, current_thread
from typing import Any, Protocol, TypeVar

from specwire.client.stream import Response

T = TypeVar("T")
Q = TypeVar("Q", contravariant=True)
A = TypeVar("A", covariant=True)


class AsyncStream(Protocol):
    """A server stream as gRPC gives it."""

    def __aiter__(self) -> AsyncIterator[Response]: ...

    def cancel(self) -> object: ...


class Stream(Protocol):
    """As AsyncStream."""

    def __iter__(self) -> Iterator[Response]: ...

    def cancel(self) -> object: ...


class AsyncUnary(Protocol[Q, A]):
    def __call__(self, request: Q, *, timeout: float) -> Awaitable[A]: ...


class Unary(Protocol[Q, A]):
    def __call__(self, request: Q, *, timeout: float) -> A: ...


class EventLoop:
    """The running loop's clock, and calls that run side by side in it."""

    def __init__(self) -> None:
        self._started: set[asyncio.Task[None]] = set()

    def now(self) -> float:
        """Seconds."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def gather(self, calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
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


class Threads:
    """As EventLoop, with a thread for each call. Where one of several raises, the others are waited for."""

    def __init__(self) -> None:
        self._started: set[Thread] = set()

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def gather(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        with ThreadPoolExecutor(len(calls), thread_name_prefix="specwire-completion") as pool:
            return [each.result() for each in [pool.submit(call) for call in calls]]

    def start(self, call: Callable[[], None]) -> None:
        thread = Thread(target=self._run, args=(call,), name="specwire-farewell", daemon=True)
        self._started.add(thread)
        thread.start()

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        finally:
            self._started.discard(current_thread())

    def ended(self) -> None:
        for thread in list(self._started):
            thread.join()
