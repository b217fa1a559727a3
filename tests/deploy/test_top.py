"""`specwire top` against real orchestrators: what it shows, and to whom."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import grpc

from deploy.cli.diagnosis.top import page, rate
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


async def asked(*words: str) -> tuple[int, str, str]:
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
            code, out, err = await asked("--address", address, "--json")
            plain = (await asked("--address", address))[1]
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
    assert session["session"] in plain
    assert "drafter" in plain


async def ask(address: str, token: str = "") -> grpc.StatusCode:
    async with open_channel(address, token=token) as channel:
        try:
            await status_pb2_grpc.StatusServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=120.0)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


KEYS, OPERATORS = Keys({TENANT: "t"}), Keys({OPERATOR: "o"})
# Who is told what all do: access, where it listens, and the answer to each token.
TOLD: list[tuple[Access, str, dict[str, str]]] = [
    (Access(), "127.0.0.1:0", {"": "OK", OPERATOR: "OK"}),
    (Access(), "0.0.0.0:0", {"": "UNIMPLEMENTED"}),
    (Access(KEYS), "127.0.0.1:0", {"": "UNIMPLEMENTED", TENANT: "UNIMPLEMENTED"}),
    (
        Access(KEYS, operator_keys=OPERATORS),
        "127.0.0.1:0",
        {"": "UNAUTHENTICATED", TENANT: "UNAUTHENTICATED", OPERATOR: "OK"},
    ),
    (Access(operator_keys=OPERATORS), "0.0.0.0:0", {"": "UNAUTHENTICATED", OPERATOR: "OK"}),
]


async def test_only_operators_see_what_all_do() -> None:
    """Where nobody is shown it, the command says how somebody would be."""
    async with stack(TARGET) as running:
        for access, listen, answers in TOLD:
            options = OrchestratorOptions((running.verifier.address,), listen=listen, insecure=True, access=access)
            orchestrator = await server.start(options)
            try:
                address = f"127.0.0.1:{orchestrator.address.rpartition(':')[2]}"
                assert {token: (await ask(address, token)).name for token in answers} == answers
                if access.keys is KEYS and access.operator_keys is None:
                    message = "this orchestrator shows its status to nobody: start it with --operator-keys"
                    assert await asked("--address", address) == (1, "", f"specwire top: error: {message}\n")
            finally:
                await orchestrator.stop(0.0)


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
    assert "down" in page(status, "here")


def test_the_rate_is_that_of_the_sessions_that_write() -> None:
    writing = pb.SessionStatus(tokens=101, writing_ms=2000)
    assert rate(pb.GetStatusResponse(sessions=[writing, pb.SessionStatus(tokens=1)])) == 50.0


def test_its_head_tells_what_is_wrong_with_the_log() -> None:
    status = pb.GetStatusResponse(
        durability="redis-wait:1",
        log_trouble="the session log takes no writes: Redis cannot save to its disk, which may be full",
        log_trouble_ms=12_000,
    )
    first, second, *_ = page(status, "127.0.0.1:50051").split("\n")
    assert first.endswith("log redis-wait:1")
    assert second == f"no session begins: {status.log_trouble}, for 12.0 s"
