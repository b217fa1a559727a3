"""A caller that finds no room is told when to come again, in the form that every gRPC client can read."""

from __future__ import annotations

from typing import cast

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from specwire.rpc.errors import RETRY_AFTER, Context, Metadata, StatusError, retry_after, retry_metadata
from tests.rpc.byte_server import method, served, service

DETAILS = "grpc-status-details-bin"
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED


async def failed(error: StatusError) -> grpc.aio.AioRpcError:
    """What a caller sees of a handler that raises `error`."""

    async def raising(request: bytes, context: Context) -> bytes:
        raise error

    async with served(service(Ask=("unary_unary", raising))) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(channel, "unary_unary", "Ask")(b"", timeout=120.0)
    return caught.value


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
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(channel, "unary_unary", "Ask")(b"", timeout=120.0)
    assert retry_after(caught.value) is None
