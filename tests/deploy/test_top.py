"""`specwire top` against real orchestrators: what it shows, and to whom."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import subprocess
import sys
import time
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest

from deploy.cli import main as cli
from deploy.cli.diagnosis.top import StatusSample, page, rate
from orchestrator import server
from orchestrator.options import OrchestratorOptions
from orchestrator.tenants import Access
from specwire.client import Chunk
from specwire.rpc.channel import open_channel
from specwire.rpc.keys import Keys
from specwire.v1 import status_pb2 as pb
from specwire.v1 import status_pb2_grpc
from tests.orchestrator.stack import DRAFT, PROMPT, TARGET, stack

ROOT = Path(__file__).resolve().parents[2]
OPERATOR, TENANT = "operators-token-1", "tenants-token-12"
LIMIT_S = 120.0
SLOW = f"{TARGET}:delay_ms=10"
CTRL_C = b"\x03"
# Its terminal becomes the one that Ctrl-C comes from.
OWNING = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


async def top(*words: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deploy", "top", *words), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    async with asyncio.timeout(LIMIT_S):
        out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_services_and_sessions_are_shown() -> None:
    async with stack(SLOW, DRAFT) as running:
        address = running.client.address
        async with aclosing(running.client.generate(PROMPT, max_tokens=3000, ignore_eos=True)) as events:
            seen = 0
            async for event in events:
                seen += len(event.tokens) if isinstance(event, Chunk) else 0
                if seen > 20:
                    break
            code, out, err = await top("--address", address, "--json", "--once")
            pages = await asyncio.gather(*(asyncio.to_thread(in_a_terminal, address, key) for key in (CTRL_C, b"xq")))
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert [each["kind"] for each in told["services"]] == ["verifier", "drafter"]
    assert {each["state"] for each in told["services"]} == {"up"}
    assert all(each["sessions"] == 1 and each["round_trip_ms"] > 0 for each in told["services"])
    (session,) = told["sessions"]
    assert (session["state"], session["prompt_tokens"], len(session["session"])) == ("running", len(PROMPT), 8)
    assert session["tokens"] >= 20
    assert 0 < session["acceptance"] <= 1
    assert session["tokens_per_second"] == told["tokens_per_second"] > 0
    for shown in pages:
        assert shown.startswith("\x1b[?1049h")  # the alternate screen
        assert shown.endswith("\x1b[?1049l")
        assert session["session"] in shown


def in_a_terminal(address: str, key: bytes) -> str:
    """What a terminal gets until a key is pressed, a few looks long."""
    ours, theirs = pty.openpty()
    words = (sys.executable, "-m", "deploy", "top", "--address", address, "--interval", "0.1")
    process = subprocess.Popen(
        [sys.executable, "-c", OWNING, *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(theirs)
    shown, end, told = "", time.monotonic() + LIMIT_S, False
    try:
        while select.select([ours], [], [], max(0.0, end - time.monotonic()))[0]:
            try:
                shown += os.read(ours, 4096).decode()
            except OSError:  # the other end is closed
                break
            if not told and shown.count("\x1b[H") >= 3:
                told = True
                os.write(ours, key)
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return shown


async def ask(address: str, token: str = "") -> grpc.StatusCode:
    async with open_channel(address, token=token) as channel:
        try:
            await status_pb2_grpc.StatusServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=120.0)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("access", "listen", "answers"),
    [
        (Access(), "127.0.0.1:0", {"": "OK", OPERATOR: "OK"}),
        (Access(), "0.0.0.0:0", {"": "UNIMPLEMENTED"}),
        (Access(Keys({TENANT: "t"})), "127.0.0.1:0", {"": "UNIMPLEMENTED", TENANT: "UNIMPLEMENTED"}),
        (
            Access(Keys({TENANT: "t"}), operator_keys=Keys({OPERATOR: "o"})),
            "127.0.0.1:0",
            {"": "UNAUTHENTICATED", TENANT: "UNAUTHENTICATED", OPERATOR: "OK"},
        ),
        (
            Access(operator_keys=Keys({OPERATOR: "o"})),
            "0.0.0.0:0",
            {"": "UNAUTHENTICATED", OPERATOR: "OK"},
        ),
    ],
)
async def test_only_operators_see_what_all_do(access: Access, listen: str, answers: dict[str, str]) -> None:
    async with stack(TARGET) as running:
        options = OrchestratorOptions((running.verifier.address,), listen=listen, insecure=True, access=access)
        orchestrator = await server.start(options)
        try:
            address = f"127.0.0.1:{orchestrator.address.rpartition(':')[2]}"
            assert {token: (await ask(address, token)).name for token in answers} == answers
        finally:
            await orchestrator.stop(0.0)


async def test_what_is_said_where_nothing_is_shown() -> None:
    async with stack(TARGET) as running:
        options = OrchestratorOptions((running.verifier.address,), access=Access(Keys({TENANT: "t"})))
        orchestrator = await server.start(options)
        try:
            code, out, err = await top("--address", orchestrator.address)
        finally:
            await orchestrator.stop(0.0)
    assert (code, out) == (1, "")
    message = "this orchestrator shows its status to nobody: start it with --operator-keys"
    assert err == f"specwire top: error: {message}\n"


async def test_a_peer_that_is_gone_is_shown() -> None:
    async with stack(TARGET, DRAFT) as running:
        await running.drafters[0].stop()
        status = pb.GetStatusResponse()
        async with open_channel(running.client.address) as channel, asyncio.timeout(LIMIT_S):
            stub = status_pb2_grpc.StatusServiceStub(channel)
            while not status.peers or not status.peers[1].trouble:
                await asyncio.sleep(0.02)
                status = await stub.GetStatus(pb.GetStatusRequest())
    assert [each.state for each in status.peers] == [pb.PEER_STATE_UP, pb.PEER_STATE_DOWN]
    assert "down" in page(StatusSample(status, 0.0), None, "here")


def test_the_rate_is_that_between_two_looks() -> None:
    before, now = (
        StatusSample(pb.GetStatusResponse(tokens=100), 5.0),
        StatusSample(pb.GetStatusResponse(tokens=160), 7.0),
    )
    assert rate(now, before) == 30.0
    writing = pb.SessionStatus(tokens=101, writing_ms=2000)
    assert rate(StatusSample(pb.GetStatusResponse(sessions=[writing]), 7.0), None) == 50.0
    restarted = StatusSample(pb.GetStatusResponse(tokens=0), 9.0)
    assert rate(restarted, now) == 0.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--interval", "0"], "interval: must be from 0.1 to 3600 seconds, not 0"),
        (["--address", "h"], "address: must be HOST:PORT with a port from 0 to 65535, not 'h'"),
    ],
)
def test_bad_usage(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", *words]) == 2
    assert capsys.readouterr().err == f"specwire top: error: {message}\n"


def test_its_head_stays_within_the_terminal() -> None:
    status = pb.GetStatusResponse(
        uptime_ms=7_384_000,
        durability="redis-wait:1",
        sessions_finished=12_345,
        tokens=10,
        proposed=9,
        accepted=7,
        log_trouble="the session log takes no writes: Redis cannot save to its disk, which may be full",
        log_trouble_ms=12_000,
    )
    whole = page(StatusSample(status, 0.0), None, "127.0.0.1:50051", "it is away")
    assert whole.split("\n")[0].endswith("log redis-wait:1")
    for columns in (40, 80):
        lines = page(StatusSample(status, 0.0), None, "127.0.0.1:50051", "it is away", columns).split("\n")
        head = lines[: lines.index("")]
        assert all(len(line) <= columns for line in head)
        assert " ".join(head).split() == whole[: whole.index("\n\n")].split()
    assert "no session begins: the session log takes no writes" in whole
    assert "for 12.0 s" in whole
