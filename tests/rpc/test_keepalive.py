"""A connection that has gone silent, as behind a proxy that forgot it, is noticed by both ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from specwire.rpc import options
from specwire.rpc.channel import open_channel
from specwire.rpc.errors import Context
from specwire.rpc.server import serve
from tests.rpc.serving import method, service

# Far below the minute that gRPC waits by itself, far above what is set here.
LIMIT_S = 20.0


class Forgetful:
    """A relay that at some moment passes on nothing more, and says so to nobody."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.address = ""
        self.hears = asyncio.Event()
        self.hears.set()

    @asynccontextmanager
    async def relaying(self) -> AsyncIterator[None]:
        listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            self.hears.set()
            listener.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        onward_reader, onward_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(self._pass(reader, onward_writer), self._pass(onward_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self.hears.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # the other end has noticed
        finally:
            writer.close()


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
    relay = Forgetful(server.address)
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
