"""A peer of the wire's first release (proto/baseline.binpb): what it does not know does not pass, either way.

It stands between two processes of today, and reads and writes every message by the older descriptors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from specwire.rpc.channel import channel_options

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
BASELINE = Path(__file__).resolve().parents[2] / "proto" / "baseline.binpb"


def older_descriptors() -> DescriptorPool:
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(BASELINE.read_bytes()).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


class OlderWire(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # it has none where it runs
    """Calls of a server, as an older peer has them. passed, dropped: bytes of fields that it knows, and of others."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.passed = self.dropped = 0
        self._channel = channel
        self._pool = older_descriptors()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """None, which is UNIMPLEMENTED, for a call that the older release does not have."""
        service, _, name = details.method.removeprefix("/").partition("/")
        try:
            method = self._pool.FindServiceByName(service).methods_by_name[name]
        except KeyError:
            return None

        # A call with one message is, to gRPC, a stream that ends behind it.
        async def relay(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
            calls = self._channel.stream_stream(details.method, None, None)
            call = calls(None, timeout=context.time_remaining())

            async def up() -> None:
                async for request in requests:
                    await call.write(self._known(method.input_type, request))
                await call.done_writing()

            writing = asyncio.create_task(up())
            try:
                await call.initial_metadata()
                await context.send_initial_metadata(())
                async for answer in call:
                    yield self._known(method.output_type, answer)
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "")
            finally:
                call.cancel()
                writing.cancel()
                with suppress(asyncio.CancelledError, asyncio.InvalidStateError, grpc.aio.AioRpcError):
                    await writing

        return grpc.stream_stream_rpc_method_handler(relay)

    def _known(self, kind: Descriptor, message: bytes) -> bytes:
        read = GetMessageClass(kind).FromString(message)
        read.DiscardUnknownFields()
        known: bytes = read.SerializeToString()
        self.passed += len(known)
        self.dropped += len(message) - len(known)
        return known


@asynccontextmanager
async def older_wire(address: str) -> AsyncIterator[tuple[str, OlderWire]]:
    """Where to call the server at `address` as an older peer would."""
    async with grpc.aio.insecure_channel(address, channel_options(address)) as channel:
        calls = OlderWire(channel)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((calls,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}", calls
        finally:
            await server.stop(None)
