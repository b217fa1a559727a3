"""The blocking client against a scripted service, each call in a thread of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

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


# ----------------------------------------------------------------------------------------------------------------------
# A client without what services need: its imports, and what a command says that is not for it.

ROOT = Path(__file__).resolve().parents[2]
# Stands at the head of a program: of what is installed it can import what a client needs; grpc needs typing_extensions.
ALONE = """
import sys
import importlib.machinery

ALLOWED = {"google", "grpc", "grpc_status", "numpy", "specwire", "typing_extensions", *sys.argv[1].split(",")}

class Alone(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        found = super().find_spec(name, path, target)
        places = (found.origin or "", *(found.submodule_search_locations or ())) if found else ()
        installed = any("site-packages" in place for place in places)
        if installed and name.partition(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Alone
"""
CALL = """
from specwire.client import AsyncClient, Client
with Client(sys.argv[2]) as client:
    print(client.complete([1, 2], max_tokens=3).text)
print(sorted({"redis", "torch", "ray", "msgspec", "tokenizers", "yaml"} & set(sys.modules)))
"""
COMMAND = """
from deploy.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


def alone(program: str, *words: str, allowed: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ALONE + program, allowed, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120.0, check=False)


async def test_it_needs_grpc_protobuf_and_numpy_only() -> None:
    async with serving(Scripted()) as address:
        done = await asyncio.to_thread(alone, CALL, address)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["abc", "[]"]), done.stderr


def test_a_command_that_serves_says_what_to_install() -> None:
    """`yaml` and `shtab` come with a client, for its command line."""
    done = alone(COMMAND, "up", allowed="yaml,shtab")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("specwire: error: ")
    assert line.endswith(" is not installed: pip install 'specwire[services]'")
    assert alone(COMMAND, "--version", allowed="yaml,shtab").stdout.startswith("specwire ")
