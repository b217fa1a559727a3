"""The largest of each field of each message and body: how much is walked between two turns of the event loop.

Every message that reaches one of our processes is made with one field as large as it can be: what a method is asked,
what a service answers, and what a route is sent.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from itertools import count, repeat
from types import FrameType
from typing import Any
from unittest.mock import patch

import grpc
import grpc.aio
import pytest

from deploy.cli.services.registry import RegistryServiceOptions, RunningRegistry, start
from orchestrator import server
from orchestrator.options import OrchestratorOptions
from orchestrator.server import RunningOrchestrator
from specwire.client import AsyncClient, SpecwireError
from specwire.core.invalid import MOST_PARTS
from specwire.rpc.channel import channel_options, server_options
from tests.fuzz.large import HANDLE, beside, large_bodies, large_messages
from tests.fuzz.messages import METHODS, path_of
from tests.fuzz.services import OURS, TEMPLATE
from tests.orchestrator.stack import DRAFT, PROMPT, TARGET, Stack, plain, stack
from tests.ports import free_address
from tests.wait import LIMIT_S

# Lines of Python, and calls, between two turns of the loop: as many as a message may have parts.
MOST_WALKED = MOST_PARTS
# Of HTTP's, each field of each route with some of the values; `make fuzz` sends all of them.
BODIES = [each for number, each in enumerate(large_bodies()) if number % 5 == 0]


class Turns:
    """Most that was walked between two turns of the loop, and in which callback."""

    def __init__(self) -> None:
        self.most, self.callback = 0, ""


@contextmanager
def counted_turns() -> Iterator[Turns]:
    """Of this thread's loop."""
    found, run, own = Turns(), asyncio.Handle._run, threading.get_ident()

    def counted(handle: asyncio.Handle) -> None:
        if threading.get_ident() != own:
            run(handle)
            return
        walked = 0

        def count(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal walked
            walked += event != "return"
            return count

        sys.settrace(count)
        try:
            run(handle)
        finally:
            sys.settrace(None)
            if walked > found.most:
                found.most, found.callback = walked, repr(handle)

    with patch.object(asyncio.Handle, "_run", counted):
        yield found


# ----------------------------------------------------------------------------------------------------------------------
# What a service is asked.


def address_of(parts: Stack, registry: RunningRegistry, method: str) -> str:
    at = {
        "VerifyService": parts.verifier.address,
        "DraftService": parts.drafters[0].address,
        "RegistryService": registry.address,
    }
    return at.get(method.partition(".")[0], parts.orchestrator.address)


@asynccontextmanager
async def registry() -> AsyncIterator[RunningRegistry]:
    """Of a Redis that does not answer."""
    running = await start(RegistryServiceOptions(f"redis://{free_address()}"))
    try:
        yield running
    finally:
        await running.stop()


async def asked(channel: grpc.aio.Channel, method: str, data: bytes) -> grpc.StatusCode:
    """How the call ends, which says nothing else."""
    stream: Any
    if METHODS[method].client_streaming:
        stream = channel.stream_stream(path_of(method), bytes, bytes)(iter([data]), timeout=LIMIT_S)
    else:
        stream = channel.unary_stream(path_of(method), bytes, bytes)(data, timeout=LIMIT_S)  # unary: a stream of one
    with suppress(grpc.aio.AioRpcError):
        async for _ in stream:
            pass
    code: grpc.StatusCode = await stream.code()
    return code


@pytest.mark.parametrize("method", METHODS)
async def test_no_message_has_much_walked_between_two_turns_of_the_loop(method: str) -> None:
    found = []
    async with (
        stack(TARGET, DRAFT, http="127.0.0.1:0", chat_template=TEMPLATE, accept_drafters=True) as parts,
        registry() as told_of,
    ):
        known = beside(parts.verifier.info.vocabulary_fingerprint)
        async with grpc.aio.insecure_channel(address_of(parts, told_of, method)) as channel:
            for large in large_messages(method, known):
                data = large.make()
                parts.orchestrator._hub._barred.clear()
                with counted_turns() as turns:
                    code = await asked(channel, method, data)
                if code in OURS or turns.most > MOST_WALKED:
                    found.append(f"{large}: {code.name}, {turns.most} in {turns.callback:.600}")
        assert len((await parts.client.complete(PROMPT, max_tokens=3)).tokens) == 3
    assert not found, "\n".join(found)


# ----------------------------------------------------------------------------------------------------------------------
# What a service answers.


class Relay:
    """In front of a service: passes on what both ends say, but for answers that it is given to say instead.

    said: by method, an answer that is said once: of a stream behind the first message of the service.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self.said: dict[str, bytes] = {}

    @asynccontextmanager
    async def serving(self, *methods: str) -> AsyncIterator[str]:
        """Its address."""
        served = grpc.aio.server(options=server_options())
        async with grpc.aio.insecure_channel(self._address, channel_options(self._address)) as self._channel:
            for method in methods:
                service, name = METHODS[method].containing_service.full_name, METHODS[method].name
                handler = grpc.unary_unary_rpc_method_handler(partial(self._unary, method))
                if METHODS[method].server_streaming:
                    handler = grpc.stream_stream_rpc_method_handler(partial(self._stream, method))
                served.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
            port = served.add_insecure_port("127.0.0.1:0")
            await served.start()
            yield f"127.0.0.1:{port}"
            await served.stop(0.0)

    async def _unary(self, method: str, request: bytes, _: object) -> bytes:
        answer: bytes = await self._channel.unary_unary(path_of(method), bytes, bytes)(request)
        return self.said.pop(method, answer)

    async def _stream(self, method: str, requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        async for answer in self._channel.stream_stream(path_of(method), bytes, bytes)(requests):
            yield answer
            if method in self.said:
                yield self.said.pop(method)


PEERS = {service: [method for method in METHODS if method.startswith(service)] for service in ("VerifyS", "DraftS")}


@asynccontextmanager
async def misled(parts: Stack) -> AsyncIterator[tuple[RunningOrchestrator, dict[str, bytes]]]:
    """An orchestrator whose verifier and drafter say what they are given to say, under a handle that sessions have."""
    verifier, drafter = Relay(parts.verifier.address), Relay(parts.drafters[0].address)
    drafter.said = verifier.said
    async with verifier.serving(*PEERS["VerifyS"]) as decides, drafter.serving(*PEERS["DraftS"]) as drafts:
        orchestrator = await server.start(OrchestratorOptions((decides,), (drafts,), "memory:", plan="stream:2,4"))
        try:
            yield orchestrator, verifier.said
        finally:
            await orchestrator.stop(0.0)


async def provoke(serving: RunningOrchestrator, client: AsyncClient, method: str, said: Mapping[str, bytes]) -> None:
    """Have the answer asked for, and what came of it over."""
    pool = serving.orchestrator.pool
    while method in said:
        peers: list[Any] = [*pool.verifiers, *pool.drafters]
        for peer in peers:
            peer._handles = repeat(HANDLE)  # of one session after the other
            if method.endswith("GetModelInfo"):
                peer.link.cut("to have it described again")
        with suppress(SpecwireError):
            if method.endswith("Score"):
                await client.score_text(PROMPT, [[(5,)]])
            else:
                await client.complete(PROMPT, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("method", [*PEERS["VerifyS"], *PEERS["DraftS"]])
async def test_no_answer_has_much_walked_between_two_turns_of_the_loop(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a verifier, or a drafter, to its orchestrator; whatever it says, the orchestrator serves on."""
    monkeypatch.setattr("specwire.rpc.link.QUARANTINE", 0.01)
    found = []
    async with stack(TARGET, DRAFT) as parts, misled(parts) as (orchestrator, said):
        known = beside(parts.verifier.info.vocabulary_fingerprint)
        async with AsyncClient(orchestrator.address) as client:
            for large in large_messages(method, known, answer=True):
                said[method] = large.make()
                with counted_turns() as turns:
                    await provoke(orchestrator, client, method, said)
                if turns.most > MOST_WALKED:
                    found.append(f"{large}: {turns.most} in {turns.callback:.600}")
            pool = orchestrator.orchestrator.pool
            peers: list[Any] = [*pool.verifiers, *pool.drafters]
            for peer in peers:
                peer._handles = count(HANDLE + 1)  # what the verifier still says of the last session is not of the next
            done = await client.complete(PROMPT, max_tokens=12, ignore_eos=True)
            assert list(done.tokens) == plain(TARGET, PROMPT, 12)
    assert not found, "\n".join(found)


# ----------------------------------------------------------------------------------------------------------------------
# What an HTTP route is sent.


@pytest.mark.parametrize("part", range(8))
async def test_no_body_has_much_walked_between_two_turns_of_the_loop(part: int) -> None:
    found = []
    form = "qwen3_coder"  # of those that write each argument by itself
    async with stack(http="127.0.0.1:0", chat_template=TEMPLATE, tool_format=form) as parts:
        host, _, port = str(parts.orchestrator.http).removeprefix("http://").rpartition(":")
        for large in BODIES[part::8]:
            data = large.make()
            with counted_turns() as turns:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(data)
                head = await reader.readline()
                await reader.read()
                writer.close()
            answered = head.split()[1] in (b"200", b"400", b"404", b"413", b"429", b"504")
            if not answered or turns.most > MOST_WALKED:
                found.append(f"{large}: {head!r}, {turns.most} in {turns.callback:.600}")
    assert not found, "\n".join(found)
