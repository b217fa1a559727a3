"""What examples/ shows other services, against a whole stack: their text is the Python client's."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from asyncio.subprocess import PIPE

import pytest

from specwire.client import Client
from tests.integration.stack_process import ROOT
from tests.rpc.relay import Relay

PROMPT = "1 2 3"
LIMIT_S = 60.0
NODE, TYPESCRIPT = ROOT / "examples" / "node", ROOT / "examples" / "typescript"
COMPILED = TYPESCRIPT / "build" / "compiled" / "client.js"
GO = ROOT / "examples" / "go" / "build" / "client"
NEEDS_NODE = pytest.mark.skipif(
    shutil.which("node") is None or not (NODE / "node_modules").is_dir(),
    reason="needs Node.js and what `make node` installs",
)
NEEDS_GO = pytest.mark.skipif(
    not GO.is_file(), reason="needs what `make go` compiles, with Go and its packages for gRPC"
)


@pytest.fixture(scope="module")
def text(address: str) -> str:
    with Client(address) as client:
        return client.complete(PROMPT, max_tokens=60).text


def ran(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def said_by(*command: str) -> str:
    done = ran(*command)
    assert done.returncode == 0, done.stderr
    return done.stdout.removesuffix("\n")


def assert_refused(*command: str) -> None:
    done = ran(*command)
    assert (done.returncode, done.stderr.partition(":")[0]) == (1, "status InvalidArgument")


@pytest.mark.parametrize("name", ["asyncio_client", "blocking_client"])
def test_in_python(name: str, address: str, text: str) -> None:
    assert said_by(sys.executable, "-m", f"examples.{name}", address, PROMPT) == text


async def test_a_stream_that_breaks_goes_on(address: str, text: str) -> None:
    relay = Relay(address)
    async with relay.relaying():
        words = (sys.executable, "-m", "examples.asyncio_client", relay.address, PROMPT)
        client = await asyncio.create_subprocess_exec(*words, cwd=ROOT, stdout=PIPE, stderr=PIPE)
        try:
            assert client.stdout is not None
            async with asyncio.timeout(LIMIT_S):
                begun = await client.stdout.read(1 << 16)
                relay.break_off()
                rest, said = await client.communicate()
        finally:
            if client.returncode is None:
                client.kill()
                await client.wait()
    assert client.returncode == 0, said.decode()
    assert (begun + rest).decode() == f"{text}\n"
    assert begun


def test_it_takes_thirty_lines() -> None:
    """Without blank ones and what says what it does."""
    source = (ROOT / "examples" / "asyncio_client.py").read_text()
    program = source.split('"""')[2]
    assert len([line for line in program.splitlines() if line.strip()]) <= 30


@pytest.mark.parametrize(
    "client",
    [
        pytest.param(
            ("node", str(ROOT / "tests" / "integration" / "generation_client.js")), id="grpc-js", marks=NEEDS_NODE
        ),
        pytest.param((str(GO.with_name("generation_client")),), id="go", marks=NEEDS_GO),
    ],
)
def test_leaving_and_coming_back(client: tuple[str, ...], address: str, text: str) -> None:
    """Clients of other generators, written from proto/ and PROTOCOL.md: in one 64 bits are decimal strings."""
    told = json.loads(said_by(*client, address))
    cancelled, deadline_exceeded, not_found, data_loss = 1, 4, 5, 15
    assert (told["whole"], told["reason"]) == (text, "FINISH_REASON_LENGTH")
    assert told["cancelled"] == [0, "FINISH_REASON_CANCELLED"]
    assert told["left"] == [cancelled, "FINISH_REASON_CANCELLED"]
    assert told["late"] == [deadline_exceeded, "FINISH_REASON_DEADLINE"]
    assert told["broken"] == [cancelled, True]
    assert told["resumed"] == [0, True, text]
    assert told["repeated"] == [True, text]
    assert (told["other"], told["unknown"]) == (data_loss, not_found)


@NEEDS_NODE
def test_in_node(address: str, text: str) -> None:
    assert said_by("node", str(NODE / "client.js"), address, PROMPT) == text


@pytest.mark.skipif(
    shutil.which("node") is None or not COMPILED.is_file(),
    reason="needs Node.js and what `make node` installs and compiles",
)
def test_in_typescript(address: str, text: str) -> None:
    """Its stubs are generated from proto/ and compiled, all types checked."""
    assert said_by("node", str(COMPILED), address, PROMPT) == text
    assert_refused("node", str(COMPILED), address, "")


@NEEDS_GO
def test_in_go(address: str, text: str) -> None:
    """Its stubs are generated from proto/."""
    assert said_by(str(GO), address, PROMPT) == text
    assert_refused(str(GO), address, "")


@pytest.mark.parametrize("name", ["asyncio_client", "blocking_client"])
def test_without_arguments_they_say_how_they_are_called(name: str) -> None:
    done = ran(sys.executable, "-m", f"examples.{name}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"usage: {ROOT / 'examples' / name}.py ADDRESS PROMPT\n"


def test_errors_are_told(address: str) -> None:
    """A status, in one line, and an exit code."""
    done = ran(sys.executable, "-m", "examples.blocking_client", address, "")
    assert done.returncode == 1
    assert "INVALID_ARGUMENT" in done.stderr
