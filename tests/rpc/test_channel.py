"""Connecting over a long way, coming back when the server does, and noticing that a connection has gone silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from bench.harness.certificates import Authority
from specwire.rpc import channel as options
from specwire.rpc.channel import Backoff, open_channel, unreachable
from specwire.rpc.errors import Context
from specwire.rpc.server import serve
from specwire.rpc.tls import ServerTls
from tests.rpc.byte_server import method, service
from tests.rpc.relay import Relay
from tests.wait import raised

# Far below the minute that gRPC waits by itself for a silent peer, far above what is set here.
LIMIT_S = 120.0
OURS = Authority()


async def echo(request: bytes, context: Context) -> bytes:
    return request


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
