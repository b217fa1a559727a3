"""A connection that has gone silent, as behind a proxy that forgot it, is noticed by both ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from specwire.rpc import channel as options
from specwire.rpc.channel import open_channel
from specwire.rpc.errors import Context
from specwire.rpc.server import serve
from tests.rpc.byte_server import method, service
from tests.rpc.relay import Relay

# Far below the minute that gRPC waits by itself, far above what is set here.
LIMIT_S = 120.0


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
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), LIMIT_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.wait_for(left.wait(), LIMIT_S)
    await server.stop(0.0)
