"""The blocking client against a scripted service, each call in a thread of its own."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from specwire.client import Client, Event, SessionState, SpecwireError
from specwire.core.messages import FinishReason
from specwire.rpc.errors import StatusError
from specwire.v1 import generation_pb2
from tests.client.service import STARTED, Scripted, serving


async def test_a_generation_and_the_rest_of_the_service() -> None:
    def work(address: str) -> None:
        with Client(address) as client:
            assert client.address == address
            assert len(list(client.generate("x"))) == 4
            completion = client.complete([1, 2], max_tokens=3)
            assert (completion.text, completion.finish_reason) == ("abc", FinishReason.LENGTH)
            assert len(list(client.watch("s-1"))) == 4
            assert client.get_session("s-1") == SessionState(2, (1, 2, 5), None, 9)
            client.cancel("s-1")
            assert client.server_info().durability == "memory"
            assert client.score_text("x", [("a",)])[0].logprob == -3.0

    async with serving(Scripted()) as address:
        await asyncio.to_thread(work, address)


async def test_a_stream_outlives_the_event_loop_of_its_thread() -> None:
    def work(address: str) -> None:
        with Client(address) as client:

            async def begin() -> list[Event]:
                return [next(stream)]

            stream = client.generate("x")
            assert len(asyncio.run(begin()) + list(stream)) == 4

    async with serving(Scripted()) as address:
        await asyncio.to_thread(work, address)


async def test_failures_have_their_code_and_message() -> None:
    def work(address: str) -> None:
        with Client(address, patience=0.0) as client:
            with pytest.raises(SpecwireError, match="NOT_FOUND: no such session"):
                client.get_session("s-2")
            with pytest.raises(SpecwireError, match="NOT_FOUND: no such session"):
                client.complete("x")

    failure = StatusError(grpc.StatusCode.NOT_FOUND, "no such session")
    async with serving(Scripted(events=(), failure=failure)) as address:
        await asyncio.to_thread(work, address)


async def test_a_service_that_cannot_serve_now_is_asked_again() -> None:
    def work(address: str) -> None:
        with Client(address, patience=0.5) as client, pytest.raises(SpecwireError, match="the log does not answer"):
            client.get_session("s-1")

    servicer = Scripted(failure=StatusError(grpc.StatusCode.UNAVAILABLE, "the log does not answer", 0.01))
    async with serving(servicer) as address:
        await asyncio.to_thread(work, address)
    assert len(servicer.asked) > 1


async def test_leaving_early_and_closing_cancel_the_session() -> None:
    def work(address: str) -> None:
        with Client(address) as client:
            left = client.generate("x")
            next(left)
            left.close()
            abandoned = client.generate("x")
            next(abandoned)
            with pytest.raises(SpecwireError) as raised:
                client.complete("x", timeout=0.2)
            assert raised.value.code is grpc.StatusCode.DEADLINE_EXCEEDED

    servicer = Scripted(events=(STARTED,), hangs=True)
    async with serving(servicer) as address:
        await asyncio.to_thread(work, address)
        await asyncio.wait_for(servicer.left.wait(), 60.0)
    assert servicer.asked.count(generation_pb2.CancelRequest(session_id="s-1")) == 2


def test_nobody_there_is_said_with_the_address(dead_address: str) -> None:
    with Client(dead_address) as client, pytest.raises(SpecwireError, match=f"cannot connect to {dead_address}"):
        client.server_info()


async def test_several_completions_are_sessions_of_one_seed() -> None:
    def work(address: str) -> int:
        with Client(address) as client:
            return len(client.complete_many("x", 3, temperature=1.0))

    servicer = Scripted()
    async with serving(servicer) as address:
        assert await asyncio.to_thread(work, address) == 3
    asked = [each for each in servicer.asked if isinstance(each, generation_pb2.GenerateRequest)]
    assert sorted(each.sampling.choice for each in asked) == [0, 1, 2]
    assert len({each.sampling.seed for each in asked}) == 1
    assert len({each.request_id for each in asked}) == 3  # each can be resumed by itself
