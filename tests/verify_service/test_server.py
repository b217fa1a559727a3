"""`python -m verify_service`: one ready line, one-line errors, exit codes, two-stage shutdown."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import sys
import threading
from asyncio.subprocess import PIPE, Process
from typing import Any

import grpc
import pytest

from specwire.core.invalid import InvalidParameter
from specwire.lm import ModelError, load_model
from specwire.rpc.server import ListenError
from specwire.rpc.server_options import ModelServiceOptions
from specwire.rpc.service_thread import StartGivenUp
from specwire.v1 import common_pb2, verify_pb2_grpc
from verify_service.engine.calibration import calibrate
from verify_service.engine.messages import QueuePatience
from verify_service.server import start

PATIENCE_S = 240.0


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


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        *(({"detach_grace": seconds}, "detach_grace") for seconds in (-1.0, math.nan, 1e9)),
        *(({"patience": QueuePatience(sessions)}, "queue") for sessions in (-1, 4097)),
        *(({"patience": QueuePatience(1, wait_us)}, "queue-wait") for wait_us in (0.0, math.nan)),
    ],
)
async def test_a_grace_and_a_queue_that_are_none_are_refused(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameter, match=field):
        await start(ModelServiceOptions("scripted:3"), **wrong)


async def test_a_size_of_memory_that_is_none_is_bad_usage() -> None:
    code, out, err = await outcome(await launch("scripted:3", "--kv-memory=2GB"))
    assert (code, out) == (2, "")
    assert "kv-memory: must be a size such as 512M or 1.5G, not '2GB'" in err


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
        (("scripted:3", "--detach-grace=-1"), 2, "detach_grace"),
        (("scripted:3", "--listen", "0.0.0.0:0"), 2, "--insecure"),
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
    before = set(threading.enumerate())
    starting = asyncio.create_task(start(ModelServiceOptions("scripted:3:delay_ms=5")))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(PATIENCE_S):
            await starting
    assert not [each for each in set(threading.enumerate()) - before if each.name == "verifier" and each.is_alive()]


def test_measuring_ends_when_the_start_is_given_up() -> None:
    def given_up() -> None:
        raise StartGivenUp

    with pytest.raises(StartGivenUp):
        calibrate(load_model("scripted:3", slots=1), go_on=given_up)


@pytest.mark.parametrize("field", ["listen", "metrics"])
async def test_a_taken_port_is_told_before_the_model_loads(field: str, taken_address: str) -> None:
    """The model is none, which is told first where the port is free."""
    options: dict[str, str] = {field: taken_address}
    with pytest.raises(ListenError, match=f"{field}: cannot listen on {taken_address}: the port is in use"):
        await start(ModelServiceOptions("/no/such/model", **options))  # type: ignore[arg-type]  # a field, by name
    with pytest.raises(ModelError, match="there is no such directory"):
        await start(ModelServiceOptions("/no/such/model"))
