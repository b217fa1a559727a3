"""Who is let in at a server's door, and what is too much or no message at all, in each of the four kinds of call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specwire.core.invalid import InvalidParameter
from specwire.rpc.channel import open_blocking_channel, open_channel
from specwire.rpc.errors import Context, retry_after
from specwire.rpc.keys import Keys
from specwire.rpc.server import Service, serve
from specwire.rpc.tls import ClientTls
from tests.rpc.byte_server import NAME, method, service

TOKEN = "a-token-of-that-length"
KEYS = Keys({TOKEN: "ada"})
KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]
LIMIT_S = 120.0


async def echoing(request: Any, context: Context) -> bytes:
    return request if isinstance(request, bytes) else await anext(aiter(request))


async def echoing_as_stream(request: Any, context: Context) -> AsyncIterator[bytes]:
    yield await echoing(request, context)


def behaviour(kind: str) -> Callable[..., Any]:
    return echoing_as_stream if kind.endswith("stream") else echoing


@asynccontextmanager
async def serving(hosted: Service, keys: Keys | None = None, most_bytes: int = 1 << 24) -> AsyncIterator[str]:
    server = await serve([replace(hosted, keys=keys, most_bytes=most_bytes)], "127.0.0.1:0")
    try:
        yield server.address
    finally:
        await server.stop(0)


async def told(channel: grpc.aio.Channel, kind: str, data: bytes) -> tuple[grpc.StatusCode, str, float | None]:
    """Call Echo; the status, its message, and when to come again."""

    async def requests() -> AsyncIterator[bytes]:
        yield data

    call = method(channel, kind, "Echo")(data if kind.startswith("unary") else requests(), timeout=LIMIT_S)
    try:
        answers = [await call] if kind.endswith("unary") else [each async for each in call]
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or "", retry_after(error)
    assert answers == [data]
    return grpc.StatusCode.OK, "", None


@pytest.mark.parametrize("kind", KINDS)
async def test_only_who_shows_a_known_token_is_let_in(kind: str) -> None:
    async with serving(service(Echo=(kind, behaviour(kind))), KEYS) as address:
        for token, code in ((TOKEN, "OK"), (f"{TOKEN}x", "UNAUTHENTICATED"), ("", "UNAUTHENTICATED")):
            async with open_channel(address, token=token) as channel:
                assert (await told(channel, kind, b"hello"))[0].name == code


async def test_threads_show_it_too() -> None:
    """The metadata that a caller gives itself stay."""

    async def telling(request: bytes, context: Context) -> bytes:
        metadata = dict(context.invocation_metadata() or ())
        return f"{metadata['x-more']!s} {metadata['authorization']!s}".encode()

    def call(address: str) -> bytes:
        with open_blocking_channel(address, token=TOKEN) as channel:
            answer: bytes = method(channel, "unary_unary", "Tell")(b"", metadata=(("x-more", "1"),), timeout=LIMIT_S)
            return answer

    async with serving(service(Tell=("unary_unary", telling)), KEYS) as address:
        assert await asyncio.to_thread(call, address) == f"1 Bearer {TOKEN}".encode()


async def test_health_checks_need_no_token() -> None:
    async with (
        serving(service(), KEYS) as address,
        open_channel(address) as channel,
    ):
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=NAME))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("kind", KINDS)
async def test_a_message_beyond_the_cap_is_not_read(kind: str) -> None:
    async with (
        serving(service(Echo=(kind, behaviour(kind))), most_bytes=100) as address,
        open_channel(address) as channel,
    ):
        assert (await told(channel, kind, bytes(100)))[0] is grpc.StatusCode.OK
        code, message, after = await told(channel, kind, bytes(101))
    assert (code, message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "request: 101 bytes, at most 100 are taken")
    assert after is not None


def undecodable(data: bytes) -> bytes:
    raise DecodeError("no such message")


@pytest.mark.parametrize("kind", KINDS)
async def test_bytes_that_are_no_message_are_invalid(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    handlers = {"Echo": make(behaviour(kind), request_deserializer=undecodable)}
    hosted = Service(
        NAME, lambda server: server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
    )
    async with serving(hosted) as address, open_channel(address) as channel:
        code, message, _ = await told(channel, kind, b"\xff")
    assert (code, message) == (grpc.StatusCode.INVALID_ARGUMENT, "request: is no message of this method's type")
    assert not [record for record in caplog.records if record.name.startswith("specwire")]


async def test_a_long_quotation_is_clipped() -> None:
    async def quoting(request: bytes, context: Context) -> bytes:
        raise InvalidParameter("id", f"no {'€' * 100_000}")

    async with (
        serving(service(Echo=("unary_unary", quoting))) as address,
        open_channel(address) as channel,
    ):
        code, message, _ = await told(channel, "unary_unary", b"")
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert (len(message), message[:5], message[-3:]) == (400, "id: n", "...")


def test_a_token_does_not_leave_the_machine_unencrypted() -> None:
    for open_it in (open_channel, open_blocking_channel):
        with pytest.raises(InvalidParameter, match=r"token: is not sent to far\.example:1 unencrypted: give --tls"):
            open_it("far.example:1", None, TOKEN)
    open_blocking_channel("far.example:1", ClientTls(), TOKEN).close()
    open_blocking_channel("127.0.0.1:1", None, TOKEN).close()
