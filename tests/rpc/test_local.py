"""Calls within a process keep what gRPC's calls promise."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from specwire.core.invalid import InvalidParameter
from specwire.rpc.errors import NEUTRAL_MESSAGE, StatusError, retry_after
from specwire.rpc.local import MOST_UNREAD, LocalServer
from specwire.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from tests.wait import raised, until

Request, Response = verify_pb2.ConnectVerifyRequest, verify_pb2.ConnectVerifyResponse
LIMIT_S = 60.0


class Servicer(verify_pb2_grpc.VerifyServiceServicer):
    """Does what a test says. `begun`: handlers that run or ran. `ended`: how each ended."""

    def __init__(self) -> None:
        self.info = common_pb2.GetModelInfoResponse(model="m", tokenizer_json=b"t")
        self.connect: Callable[[AsyncIterator[Any], Any], Awaitable[None]]
        self.score: Callable[[Any, Any], Awaitable[Any]]
        self.begun = 0
        self.ended: list[str] = []

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return self.info

    async def Score(self, request: Any, context: Any) -> Any:
        return await self._noted(self.score(request, context))

    async def Connect(self, requests: AsyncIterator[Any], context: Any) -> None:
        await self._noted(self.connect(requests, context))

    async def _noted(self, handler: Awaitable[Any]) -> Any:
        self.begun += 1
        try:
            done = await handler
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        except Exception as error:
            self.ended.append(type(error).__name__)
            raise
        self.ended.append("done")
        return done


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Servicer, LocalServer, Any]]:
    """A service, its server and a stub of it; nothing runs at the end."""
    servicer, server = Servicer(), LocalServer()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server)
    async with asyncio.timeout(LIMIT_S):
        async with server.channel() as channel:
            yield servicer, server, verify_pb2_grpc.VerifyServiceStub(channel)
        await server.stop()
        assert not server._running


async def status(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    """What it ends with."""
    caught = await raised(grpc.aio.AioRpcError, call)
    return caught.code(), caught.details() or ""


def opened(number: int) -> Any:
    return Request(forgotten=[str(number)])


async def echo(requests: AsyncIterator[Any], context: Any) -> None:
    async for request in requests:
        for name in request.forgotten:
            await context.write(Response(opened=[{"handle": int(name)}]))


async def forever(*_: object) -> None:
    await asyncio.Event().wait()


async def test_what_is_answered_is_the_callers_own() -> None:
    async with served() as (servicer, _, stub):
        info = await stub.GetModelInfo(common_pb2.GetModelInfoRequest())
        info.ClearField("tokenizer_json")
        again = await stub.GetModelInfo(common_pb2.GetModelInfoRequest(), timeout=LIMIT_S)
        assert (again.model, again.tokenizer_json) == ("m", b"t")
        assert servicer.info.tokenizer_json == b"t"


async def test_messages_arrive_in_order_and_the_end_behind_them() -> None:
    async with served() as (servicer, _, stub):
        servicer.connect = echo
        call = stub.Connect()
        await call.wait_for_connection()

        async def write() -> None:
            for number in range(100):
                await call.write(opened(number))
            await call.done_writing()

        writing = asyncio.create_task(write())
        heard = [message.opened[0].handle async for message in call]
        assert heard == list(range(100))
        await writing
        assert servicer.ended == ["done"]


async def test_an_end_that_does_not_read_stops_the_other() -> None:
    """The service by a client that does not read, and the client by a service that does not."""
    async with served() as (servicer, _, stub):
        go_on, told = asyncio.Event(), list[int]()

        async def speak(requests: AsyncIterator[Any], context: Any) -> None:
            for number in range(20):
                await context.write(Response(opened=[{"handle": number}]))
                told.append(number)
            await go_on.wait()
            async for _ in requests:
                pass

        servicer.connect = speak
        call, written = stub.Connect(), list[int]()

        async def write() -> None:
            for number in range(20):
                await call.write(opened(number))
                written.append(number)
            await call.done_writing()

        writing = asyncio.create_task(write())
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(told) == len(written) == MOST_UNREAD
        reading = asyncio.create_task(anext(aiter(call)))
        await until(lambda: len(told) == MOST_UNREAD + 1)
        assert (await reading).opened[0].handle == 0
        go_on.set()
        assert [message.opened[0].handle async for message in call] == list(range(1, 20))
        await writing


@pytest.mark.parametrize(
    ("error", "code", "details", "again"),
    [
        (InvalidParameter("field", "is wrong"), grpc.StatusCode.INVALID_ARGUMENT, "field: is wrong", None),
        (StatusError(grpc.StatusCode.UNAVAILABLE, "elsewhere"), grpc.StatusCode.UNAVAILABLE, "elsewhere", None),
        (StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED, "full", 2.5),
        (RuntimeError("a secret"), grpc.StatusCode.INTERNAL, NEUTRAL_MESSAGE, None),
    ],
)
async def test_what_a_handler_raises_is_told_as_the_policy_says(
    error: Exception, code: grpc.StatusCode, details: str, again: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)

    async def fail(*_: object) -> None:
        raise error

    async with served() as (servicer, _, stub):
        servicer.score = servicer.connect = fail
        unary = await raised(grpc.aio.AioRpcError, stub.Score(verify_pb2.ScoreRequest()))
        call = stub.Connect()
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            async for _ in call:
                pass
        await raised(grpc.aio.AioRpcError, call.write(opened(1)))
        for caught in (unary, stream.value):
            assert (caught.code(), caught.details()) == (code, details)
            assert retry_after(caught) == again
    assert len(caplog.records) == 2 * (code is grpc.StatusCode.INTERNAL)


async def test_an_aborted_call_has_its_status_behind_what_was_said() -> None:
    async def abort(_: object, context: Any) -> None:
        await context.write(Response(draining=True))
        await context.abort(grpc.StatusCode.DATA_LOSS, "gone", (("key", "value"),))

    async with served() as (servicer, _, stub):
        servicer.connect = abort
        call = stub.Connect()
        assert (await anext(aiter(call))).draining
        caught = await raised(grpc.aio.AioRpcError, anext(aiter(call)), "gone")
        assert caught.code() is grpc.StatusCode.DATA_LOSS
        trailers: Any = caught.trailing_metadata()
        assert ("key", "value") in list(trailers)


async def test_a_call_that_its_client_leaves_is_cancelled_at_the_service() -> None:
    async with served() as (servicer, _, stub):
        servicer.score = servicer.connect = forever
        asking = asyncio.create_task(asyncio.wait_for(stub.Score(verify_pb2.ScoreRequest()), LIMIT_S))
        call = stub.Connect()
        reading = asyncio.create_task(anext(aiter(call)))
        await until(lambda: servicer.begun == 2)
        asking.cancel()
        assert call.cancel()
        for task in (asking, reading):
            await raised(asyncio.CancelledError, task)
        await raised(asyncio.CancelledError, call.write(opened(1)))
        await until(lambda: servicer.ended == ["cancelled", "cancelled"])
        assert not call.cancel()


async def test_a_deadline_ends_a_call_at_both_ends() -> None:
    remaining: list[float] = []

    async def wait(_: object, context: Any) -> None:
        remaining.append(context.time_remaining())
        await forever()

    async with served() as (servicer, _, stub):
        servicer.score = servicer.connect = wait
        for call in (stub.Score(verify_pb2.ScoreRequest(), timeout=0.05), anext(aiter(stub.Connect(timeout=0.05)))):
            assert (await status(call))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: servicer.ended == ["cancelled", "cancelled"])
        assert all(0 < each <= 0.05 for each in remaining)


async def test_a_service_that_stops_ends_its_calls_and_takes_no_more() -> None:
    async with served() as (servicer, server, stub):
        servicer.score = servicer.connect = forever
        call = stub.Connect()
        reading = asyncio.create_task(anext(aiter(call)))
        await until(lambda: servicer.begun == 1)
        unbegun = stub.Connect()
        await server.stop()
        for end in (reading, anext(aiter(unbegun)), stub.Score(verify_pb2.ScoreRequest())):
            assert await status(end) == (grpc.StatusCode.UNAVAILABLE, "the service has stopped")
        assert (servicer.begun, servicer.ended) == (1, ["cancelled"])


async def test_a_method_that_nobody_serves_is_unimplemented() -> None:
    async with served() as (_, server, stub):
        server.handlers.clear()
        assert (await status(stub.Score(verify_pb2.ScoreRequest())))[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_a_channel_that_is_closed_ends_its_calls() -> None:
    async with served() as (servicer, server, _):
        servicer.connect = forever
        async with server.channel() as channel:
            call = verify_pb2_grpc.VerifyServiceStub(channel).Connect()
            await until(lambda: servicer.begun == 1)
        await raised(asyncio.CancelledError, anext(aiter(call)))
        await until(lambda: servicer.ended == ["cancelled"])
