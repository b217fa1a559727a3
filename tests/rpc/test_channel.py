"""Connecting over a long way, and coming back when the server does."""

from __future__ import annotations

import asyncio

import pytest

from bench.harness.certificates import Authority
from specwire.rpc.channel import open_channel, unreachable
from specwire.rpc.errors import Context
from specwire.rpc.server import serve
from specwire.rpc.tls import ServerTls
from tests.rpc.byte_server import method, service
from tests.rpc.relay import Relay

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
