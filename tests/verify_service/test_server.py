"""`python -m verify_service`: one ready line, one-line errors, exit codes, two-stage shutdown."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
from asyncio.subprocess import PIPE, Process

import grpc
import pytest

from specwire.rpc.process import ModelServiceOptions
from specwire.rpc.server import ListenError
from specwire.v1 import common_pb2, verify_pb2_grpc
from verify_service.inbox import Inbox
from verify_service.server import start
from verify_service.worker import Worker

PATIENCE_S = 45.0


async def launch(*arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "verify_service", *arguments, stdout=PIPE, stderr=PIPE
    )


async def outcome(process: Process) -> tuple[int | None, str, str]:
    try:
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, out.decode(), err.decode()


async def first_line(process: Process) -> str:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)).decode()


async def test_serves_until_a_signal() -> None:
    process = await launch("scripted:3", "--json")
    try:
        ready = json.loads(await first_line(process))
        async with grpc.aio.insecure_channel(ready["address"]) as channel:
            stub = verify_pb2_grpc.VerifyServiceStub(channel)
            info = await stub.GetModelInfo(common_pb2.GetModelInfoRequest(), timeout=PATIENCE_S)
            assert info.model == "scripted:3"
        process.send_signal(signal.SIGTERM)
    finally:
        code, out, err = await outcome(process)
    assert (code, out) == (0, "")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("/nowhere/at/all",), 1, "/nowhere/at/all"),
        (("scripted:3", "--listen", "nonsense"), 2, "nonsense"),
        (("scripted:3", "--threads", "0"), 2, "threads"),
        (("scripted:3", "--listen", "0.0.0.0:0"), 1, "--insecure"),
        ((), 2, "MODEL"),
    ],
)
async def test_bad_usage_is_one_line(arguments: tuple[str, ...], code: int, named: str) -> None:
    status, out, err = await outcome(await launch(*arguments))
    assert (status, out) == (code, "")
    assert named in err
    assert "Traceback" not in err


async def test_taken_port_is_named_and_the_engine_ends(taken_address: str) -> None:
    with pytest.raises(ListenError, match=taken_address):
        await start(ModelServiceOptions("scripted:3", listen=taken_address))


async def test_cancelled_start_returns_when_its_thread_has_ended() -> None:
    starting = asyncio.create_task(start(ModelServiceOptions("scripted:3:delay_ms=5")))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(starting, PATIENCE_S)
    assert not [thread for thread in threading.enumerate() if thread.name == "verifier" and thread.is_alive()]


class Exploding:
    """An engine whose thread fails once it runs."""

    def __init__(self) -> None:
        self.inbox = Inbox()

    def run(self) -> None:
        raise RuntimeError("no more")


async def test_engine_that_fails_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(lambda _: (Exploding(), "info"))
    assert await worker.start() == "info"
    assert "no more" in await asyncio.wait_for(worker.failed(), PATIENCE_S)
    assert "no more" in caplog.text
    await worker.stop()
