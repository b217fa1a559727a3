"""A server with one test service of generic byte methods, for the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from specwire.rpc.channel import channel_options
from specwire.rpc.server import RunningServer, Service, serve

NAME = "specwire.v1.TestService"
Channel = grpc.aio.Channel


def service(**methods: tuple[str, Callable[..., Any]]) -> Service:
    """Methods by name: (kind such as "unary_stream", behaviour); requests and responses are bytes."""
    handlers = {
        name: getattr(grpc, f"{kind}_rpc_method_handler")(behaviour) for name, (kind, behaviour) in methods.items()
    }
    generic = grpc.method_handlers_generic_handler(NAME, handlers)
    return Service(NAME, lambda server: server.add_generic_rpc_handlers((generic,)))


@asynccontextmanager
async def served(hosted: Service) -> AsyncIterator[tuple[RunningServer, Channel]]:
    server = await serve([hosted], "127.0.0.1:0")
    try:
        async with grpc.aio.insecure_channel(server.address, options=channel_options(server.address)) as channel:
            yield server, channel
    finally:
        await server.stop(0)


def method(channel: Channel | grpc.Channel, kind: str, name: str) -> Any:
    return getattr(channel, kind)(f"/{NAME}/{name}", request_serializer=None, response_deserializer=None)
