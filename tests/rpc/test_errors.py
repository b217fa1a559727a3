"""What a caller sees when a handler raises, in each of the four kinds of call, and when it is told to come again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from specwire.core.invalid import InvalidParameter
from specwire.rpc.errors import (
    NEUTRAL_MESSAGE,
    RETRY_AFTER,
    Context,
    Metadata,
    StatusError,
    code_number,
    code_of,
    retry_after,
    retry_metadata,
)
from tests.rpc.byte_server import method, served, service
from tests.wait import raised

SECRET = "a secret detail"
KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]
RAISED: dict[str, Exception] = {
    "invalid": InvalidParameter("top_p", "must be above 0"),
    "stale": StatusError(grpc.StatusCode.FAILED_PRECONDITION, "fence 1 is not the newest"),
    "bug": KeyError(SECRET),
}


async def raising(request: Any, context: Context) -> bytes:
    name = request if isinstance(request, bytes) else await anext(aiter(request))
    raise RAISED[name.decode()]


async def raising_after_one(request: Any, context: Context) -> AsyncIterator[bytes]:
    yield b"first"
    await raising(request, context)


async def outcome(channel: grpc.aio.Channel, kind: str, name: str) -> tuple[list[bytes], grpc.aio.AioRpcError]:
    async def requests() -> AsyncIterator[bytes]:
        yield name.encode()

    call = method(channel, kind, "Raise")(name.encode() if kind.startswith("unary") else requests(), timeout=120.0)
    received: list[bytes] = []

    async def collect() -> None:
        if kind.endswith("unary"):
            await call
        async for message in call:
            received.append(message)

    return received, await raised(grpc.aio.AioRpcError, collect())


@pytest.mark.parametrize("kind", KINDS)
async def test_each_error_has_its_status(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async with served(service(Raise=(kind, raising))) as (_, channel):
        _, invalid = await outcome(channel, kind, "invalid")
        _, stale = await outcome(channel, kind, "stale")
        assert not caplog.records
        _, bug = await outcome(channel, kind, "bug")
    assert (invalid.code(), invalid.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "top_p: must be above 0")
    assert (stale.code(), stale.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "fence 1 is not the newest")
    assert (bug.code(), bug.details()) == (grpc.StatusCode.INTERNAL, NEUTRAL_MESSAGE)
    logged = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(logged) == 1
    assert "/Raise" in logged[0].getMessage()
    assert SECRET in str(logged[0].exc_info)


@pytest.mark.parametrize("kind", ["unary_stream", "stream_stream"])
async def test_a_generator_keeps_what_it_sent_before_the_error(kind: str) -> None:
    async with served(service(Raise=(kind, raising_after_one))) as (_, channel):
        received, error = await outcome(channel, kind, "stale")
    assert received == [b"first"]
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("as_generator", [False, True])
async def test_cancellation_reaches_the_handler_and_is_not_logged(
    as_generator: bool, caplog: pytest.LogCaptureFixture
) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def waiting(request: bytes, context: Context) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def generating(request: bytes, context: Context) -> AsyncIterator[bytes]:
        await waiting(request, context)
        yield b""

    behaviour: Callable[..., Awaitable[None] | AsyncIterator[bytes]] = generating if as_generator else waiting
    async with served(service(Wait=("unary_stream", behaviour))) as (_, channel):
        call = method(channel, "unary_stream", "Wait")(b"x", timeout=120.0)
        await asyncio.wait_for(started.wait(), 60.0)
        call.cancel()
        await asyncio.wait_for(cancelled.wait(), 60.0)
    assert not [record for record in caplog.records if record.name.startswith("specwire")]


async def test_a_generator_that_is_sending_is_closed_when_its_call_is_cancelled() -> None:
    closed = asyncio.Event()

    async def endless(request: bytes, context: Context) -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(100_000)
        finally:
            closed.set()

    async with served(service(Send=("unary_stream", endless))) as (_, channel):
        call = method(channel, "unary_stream", "Send")(b"x", timeout=120.0)
        await call.read()  # and no more: flow control stops the sender within a yield
        call.cancel()
        await asyncio.wait_for(closed.wait(), 60.0)


def test_codes_and_their_numbers() -> None:
    assert all(code_of(code_number(code)) is code for code in grpc.StatusCode if code is not grpc.StatusCode.OK)
    assert code_of(0) is grpc.StatusCode.UNKNOWN  # a failure by that code could not be told
    assert code_number(grpc.StatusCode.FAILED_PRECONDITION) == 9
    assert code_of(12345) is grpc.StatusCode.UNKNOWN


# When to come again

DETAILS = "grpc-status-details-bin"
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED


async def failed(error: StatusError) -> grpc.aio.AioRpcError:
    """What a caller sees of a handler that raises `error`."""

    async def raising(request: bytes, context: Context) -> bytes:
        raise error

    async with served(service(Ask=("unary_unary", raising))) as (_, channel):
        return await raised(grpc.aio.AioRpcError, method(channel, "unary_unary", "Ask")(b"", timeout=120.0))


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (StatusError(FULL, "all slots are taken"), RETRY_AFTER),
        (StatusError(FULL, "barred", 59.25), 59.25),
        (StatusError(grpc.StatusCode.UNAVAILABLE, "draining", 0.0), 0.0),
        (StatusError(grpc.StatusCode.NOT_FOUND, "no such session"), None),
    ],
    ids=lambda value: str(value),
)
async def test_a_status_tells_when_to_ask_again(error: StatusError, seconds: float | None) -> None:
    seen = await failed(error)
    assert (seen.code(), seen.details()) == (error.code, error.message)
    assert retry_after(seen) == seconds


async def test_the_details_are_a_status_of_google_rpc() -> None:
    seen = await failed(StatusError(FULL, "all slots are taken", 2.5))
    status = rpc_status.from_call(cast(grpc.Call, seen))
    assert status is not None
    info = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert (status.code, status.message, info.retry_delay.ToMilliseconds()) == (8, "all slots are taken", 2500)


@pytest.mark.parametrize(
    "trailers",
    [
        ((DETAILS, b"\xff\xff not a message"),),
        retry_metadata(FULL, "another message", 3.0),
        retry_metadata(grpc.StatusCode.ABORTED, "full", 3.0),
        ((DETAILS, status_pb2.Status(code=8, message="full").SerializeToString()),),
    ],
    ids=["garbage", "another message", "another code", "no details"],
)
async def test_details_that_say_something_else_are_ignored(trailers: Metadata) -> None:
    async def aborting(request: bytes, context: Context) -> bytes:
        await context.abort(FULL, "full", trailers)

    async with served(service(Ask=("unary_unary", aborting))) as (_, channel):
        caught = await raised(grpc.aio.AioRpcError, method(channel, "unary_unary", "Ask")(b"", timeout=120.0))
    assert (caught.code(), caught.details()) == (FULL, "full")  # the handler's own, untouched
    assert retry_after(caught) is None
