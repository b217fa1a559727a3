"""Health, reflection, addresses, stopping; who is let in, and what is too much or no message at all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, TypeAlias

import grpc
import grpc.aio
import pytest
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.harness.certificates import Authority
from specwire.core.invalid import InvalidParameter
from specwire.rpc import channel as options
from specwire.rpc.channel import (
    Backoff,
    channel_options,
    is_loopback,
    open_blocking_channel,
    open_channel,
    server_options,
    unreachable,
)
from specwire.rpc.errors import Context, retry_after
from specwire.rpc.keys import Keys
from specwire.rpc.server import ListenError, Service, parse_listen, serve
from specwire.rpc.tls import ServerTls
from tests.rpc.byte_server import NAME, method, served, service
from tests.rpc.relay import Relay
from tests.wait import raised

Status: TypeAlias = "health_pb2.HealthCheckResponse.ServingStatus"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def echo(request: bytes, context: Context) -> bytes:
    return request


async def health_of(channel: grpc.aio.Channel, name: str) -> Status:
    stub = health_pb2_grpc.HealthStub(channel)
    answer: health_pb2.HealthCheckResponse = await stub.Check(
        health_pb2.HealthCheckRequest(service=name), timeout=120.0
    )
    return answer.status


async def test_calls_by_the_thousand_wait_for_their_turn() -> None:
    async with served(service(Echo=("unary_unary", echo))) as (_, channel):
        call = method(channel, "unary_unary", "Echo")
        answers = await asyncio.gather(*(call(b"hello", timeout=120.0) for _ in range(4000)))
    assert answers == [b"hello"] * 4000


async def test_health_says_what_it_is_told_for_the_server_and_each_service() -> None:
    async with served(service()) as (server, channel):
        assert [await health_of(channel, name) for name in ("", NAME)] == [SERVING] * 2
        await server.set_serving(False)
        assert [await health_of(channel, name) for name in ("", NAME)] == [NOT_SERVING] * 2
        caught = await raised(grpc.aio.AioRpcError, health_of(channel, "no.such.Service"))
        assert caught.code() is grpc.StatusCode.NOT_FOUND


async def test_a_port_in_use_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    async with served(service()) as (server, _):
        await raised(ListenError, serve([service()], server.address), f"{server.address}: the port is in use")
    assert capfd.readouterr().err == ""


async def test_other_machines_are_let_in_only_knowingly() -> None:
    for listen in ("0.0.0.0:0", "[::]:0", "192.0.2.1:0", "some-host:0"):
        await raised(ListenError, serve([service()], listen), "--insecure")
    server = await serve([service()], "0.0.0.0:0", allow_insecure=True)
    assert server.address == f"127.0.0.1:{server.port}"
    await server.stop(0)


async def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(ListenError, match=r"cannot listen on 192\.0\.2\.1:0"):
        await serve([service()], "192.0.2.1:0", allow_insecure=True)


@pytest.mark.parametrize("listen", ["", "here", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "h:-1"])
def test_what_is_no_address_is_named(listen: str) -> None:
    with pytest.raises(ListenError, match="is not HOST:PORT"):
        parse_listen(listen)


def test_addresses() -> None:
    assert parse_listen(":80") == parse_listen("localhost:80") == ("127.0.0.1", 80)
    assert parse_listen("[::1]:0") == ("::1", 0)
    assert [is_loopback(host) for host in ("127.0.0.9", "::1", "localhost", "10.0.0.1", "localhost.evil", "")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]


def test_the_proxy_is_left_out_on_loopback_only() -> None:
    direct = ("grpc.enable_http_proxy", 0)
    assert direct in channel_options("127.0.0.1:1")
    assert direct in channel_options("[::1]:1")
    assert direct not in channel_options("example.org:1")


def test_clients_ping_less_often_than_servers_allow() -> None:
    pings = dict(channel_options("127.0.0.1:1"))["grpc.keepalive_time_ms"]
    assert int(pings) > int(dict(server_options())["grpc.http2.min_ping_interval_without_data_ms"])


async def test_stopping_lets_running_calls_end_and_refuses_new_ones() -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    async def slow(request: bytes, context: Context) -> bytes:
        entered.set()
        await release.wait()
        return b"done"

    async with served(service(Slow=("unary_unary", slow))) as (server, channel):
        call = method(channel, "unary_unary", "Slow")(b"x", timeout=120.0)
        await asyncio.wait_for(entered.wait(), 60.0)
        stopping = asyncio.create_task(server.stop(20))
        release.set()
        assert await call == b"done"
        await asyncio.wait_for(stopping, 60.0)
        with socket.create_server(("127.0.0.1", server.port)):
            pass  # the port is free again


async def test_stopping_ends_calls_that_outstay_their_grace() -> None:
    entered = asyncio.Event()

    async def stuck(request: bytes, context: Context) -> bytes:
        entered.set()
        await asyncio.Event().wait()
        return b""

    async with served(service(Stuck=("unary_unary", stuck))) as (server, channel):
        call = method(channel, "unary_unary", "Stuck")(b"x", timeout=120.0)
        await asyncio.wait_for(entered.wait(), 60.0)
        await asyncio.wait_for(server.stop(0.05), 60.0)
        await raised(grpc.aio.AioRpcError, call)


# Who is let in, in each of the four kinds of call, and with what

TOKEN = "a-token-of-that-length"
KEYS = Keys({TOKEN: "ada"})
KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]


async def echoing(request: Any, context: Context) -> bytes:
    return request if isinstance(request, bytes) else await anext(aiter(request))


async def echoing_as_stream(request: Any, context: Context) -> AsyncIterator[bytes]:
    yield await echoing(request, context)


def behaviour(kind: str) -> Callable[..., Any]:
    return echoing_as_stream if kind.endswith("stream") else echoing


async def told(channel: grpc.aio.Channel, kind: str, data: bytes) -> tuple[grpc.StatusCode, str, float | None]:
    """Call Echo; the status, its message, and when to come again."""

    async def requests() -> AsyncIterator[bytes]:
        yield data

    call = method(channel, kind, "Echo")(data if kind.startswith("unary") else requests(), timeout=120.0)
    try:
        answers = [await call] if kind.endswith("unary") else [each async for each in call]
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or "", retry_after(error)
    assert answers == [data]
    return grpc.StatusCode.OK, "", None


@pytest.mark.parametrize("kind", KINDS)
async def test_only_who_shows_a_known_token_is_let_in(kind: str) -> None:
    async with served(replace(service(Echo=(kind, behaviour(kind))), keys=KEYS)) as (server, _):
        for token, code in ((TOKEN, "OK"), (f"{TOKEN}x", "UNAUTHENTICATED"), ("", "UNAUTHENTICATED")):
            async with open_channel(server.address, token=token) as channel:
                assert (await told(channel, kind, b"hello"))[0].name == code


async def test_threads_show_it_too() -> None:
    """The metadata that a caller gives itself stay."""

    async def telling(request: bytes, context: Context) -> bytes:
        metadata = dict(context.invocation_metadata() or ())
        return f"{metadata['x-more']!s} {metadata['authorization']!s}".encode()

    def call(address: str) -> bytes:
        with open_blocking_channel(address, token=TOKEN) as channel:
            answer: bytes = method(channel, "unary_unary", "Tell")(b"", metadata=(("x-more", "1"),), timeout=120.0)
            return answer

    async with served(replace(service(Tell=("unary_unary", telling)), keys=KEYS)) as (server, _):
        assert await asyncio.to_thread(call, server.address) == f"1 Bearer {TOKEN}".encode()


async def test_health_checks_need_no_token() -> None:
    async with served(replace(service(), keys=KEYS)) as (_, channel):
        assert await health_of(channel, NAME) == SERVING


@pytest.mark.parametrize("kind", KINDS)
async def test_a_message_beyond_the_cap_is_not_read(kind: str) -> None:
    async with served(replace(service(Echo=(kind, behaviour(kind))), most_bytes=100)) as (_, channel):
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
    async with served(hosted) as (_, channel):
        code, message, _ = await told(channel, kind, b"\xff")
    assert (code, message) == (grpc.StatusCode.INVALID_ARGUMENT, "request: is no message of this method's type")
    assert not [record for record in caplog.records if record.name.startswith("specwire")]


async def test_a_long_quotation_is_clipped() -> None:
    async def quoting(request: bytes, context: Context) -> bytes:
        raise InvalidParameter("id", f"no {'€' * 100_000}")

    async with served(service(Echo=("unary_unary", quoting))) as (_, channel):
        code, message, _ = await told(channel, "unary_unary", b"")
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert (len(message), message[:5], message[-3:]) == (400, "id: n", "...")


# ----------------------------------------------------------------------------------------------------------------------
# Connecting over a long way, coming back when the server does, and noticing that a connection has gone silent.

# Far below the minute that gRPC waits by itself for a silent peer, far above what is set here.
LIMIT_S = 120.0
OURS = Authority()


@pytest.mark.parametrize("tls", [None, OURS.server()], ids=["plain", "tls"])
async def test_a_far_server_is_reached_by_the_first_attempt(tls: ServerTls | None) -> None:
    """Every handshake costs a round trip, here of 0.3 s."""
    server = await serve([service(Echo=("unary_unary", echo))], "127.0.0.1:0", tls=tls)
    relay = Relay(server.address, delay=0.15)
    async with relay.relaying(), open_channel(relay.address, OURS.client() if tls else None) as channel:
        assert await method(channel, "unary_unary", "Echo")(b"far", timeout=LIMIT_S) == b"far"
    await server.stop(0.0)


async def test_a_server_that_comes_later_is_found_soon(dead_address: str) -> None:
    async with open_channel(dead_address) as channel:
        call = method(channel, "unary_unary", "Echo")(b"late", timeout=LIMIT_S, wait_for_ready=True)
        await asyncio.sleep(0.5)
        server = await serve([service(Echo=("unary_unary", echo))], dead_address)
        assert await asyncio.wait_for(call, 20.0) == b"late"  # attempts are at most 2 s apart, without us 120 s
    await server.stop(0.0)


def test_what_is_not_about_connecting_is_left_alone() -> None:
    assert unreachable("the verifier is stopping", "a:1", tls=False) is None
    assert unreachable("failed to connect to all addresses; last error: x", "a:1", tls=False) == "cannot connect to a:1"


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "sending"])
async def test_both_ends_notice_a_silent_connection(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PING_EVERY_MS", 1000), ("PING_TIMEOUT_MS", 1000), ("LEAST_PING_INTERVAL_MS", 500)):
        monkeypatch.setattr(options, name, value)
    left = asyncio.Event()

    async def echo(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        try:
            async for request in requests:
                yield request
        finally:
            left.set()

    server = await serve([service(Echo=("stream_stream", echo))], "127.0.0.1:0")
    relay = Relay(server.address)
    async with relay.relaying(), open_channel(relay.address) as channel:
        call = method(channel, "stream_stream", "Echo")(timeout=3 * LIMIT_S)
        await call.write(b"hello")
        assert await call.read() == b"hello"
        relay.hears.clear()
        if busy:
            await call.write(b"anybody there?")
        caught = await raised(grpc.aio.AioRpcError, asyncio.wait_for(call.read(), LIMIT_S))
        assert caught.code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.wait_for(left.wait(), LIMIT_S)
    await server.stop(0.0)


def test_waits_double_up_to_a_limit_and_are_scattered_over_their_upper_half() -> None:
    backoff = Backoff(0.1, 1.0)
    for most in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert most / 2 <= backoff.next() <= most
    assert backoff.next(held=4.0) >= 0.5
    assert 0.05 <= backoff.next(held=6.0) <= 0.1
    assert len({Backoff(1.0, 2.0).next() for _ in range(10)}) > 1
    backoff.reset()
    assert 0.05 <= backoff.next() <= 0.1
