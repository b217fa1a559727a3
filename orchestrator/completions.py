"""Several completions of one prompt: each a session of its own, their events in one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from specwire.core.sampling import InvalidParameter
from specwire.v1 import generation_pb2 as pb

MOST_COMPLETIONS = 64

T = TypeVar("T")


def single_requests(request: pb.GenerateRequest) -> list[pb.GenerateRequest]:
    """What each of the request's completions is asked for; whoever begins them gives all the same seed.

    Raises:
        InvalidParameter: too many, or what makes sense for one only.
    """
    if request.n <= 1:
        return [request]
    if request.n > MOST_COMPLETIONS:
        raise InvalidParameter("n", f"must be from 0 to {MOST_COMPLETIONS}, not {request.n}")
    if request.sampling.choice:
        raise InvalidParameter("choice", f"must be 0 where n is {request.n}, not {request.sampling.choice}")
    if request.request_id:
        raise InvalidParameter("request_id", f"stands for one session, so n must be 1, not {request.n}")
    return [_single(request, choice) for choice in range(request.n)]


def _single(request: pb.GenerateRequest, choice: int) -> pb.GenerateRequest:
    single = pb.GenerateRequest()
    single.CopyFrom(request)
    single.ClearField("n")
    single.sampling.choice = choice
    return single


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """What the streams bring, as it comes, each with its stream's index.

    A stream is asked for more once what it brought has been taken. The first that fails ends all; so does closing this.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for part in only:
                yield 0, part
        return
    waiting = {asyncio.create_task(_next(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index, brought = waiting.pop(task), task.result()
                for part in brought:
                    yield index, part
                    waiting[asyncio.create_task(_next(streams[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[T, None]) -> tuple[T, ...]:
    """The next part; nothing at the end."""
    async for part in stream:
        return (part,)
    return ()
