"""Health, reflection, addresses, stopping."""

from __future__ import annotations

import asyncio
import socket
from typing import TypeAlias

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specwire.rpc.channel import channel_options, is_loopback, server_options
from specwire.rpc.errors import Context
from specwire.rpc.server import ListenError, parse_listen, serve
from tests.rpc.byte_server import NAME, method, served, service

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


async def test_a_free_port_is_reported_and_called() -> None:
    async with served(service(Echo=("unary_unary", echo))) as (server, channel):
        assert server.address == f"127.0.0.1:{server.port}"
        assert server.port > 0
        assert await method(channel, "unary_unary", "Echo")(b"hello", timeout=120.0) == b"hello"


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
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_of(channel, "no.such.Service")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services() -> None:
    async with served(service()) as (_, channel):
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=120.0)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        await call.done_writing()
    names = {listed.name for listed in answer.list_services_response.service}
    assert {NAME, "grpc.health.v1.Health"} <= names


async def test_a_port_in_use_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    async with served(service()) as (server, _):
        with pytest.raises(ListenError, match=f"{server.address}: the port is in use"):
            await serve([service()], server.address)
    assert capfd.readouterr().err == ""


async def test_other_machines_are_let_in_only_knowingly() -> None:
    for listen in ("0.0.0.0:0", "[::]:0", "192.0.2.1:0", "some-host:0"):
        with pytest.raises(ListenError, match="--insecure"):
            await serve([service()], listen)
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
        with pytest.raises(grpc.aio.AioRpcError):
            await call
