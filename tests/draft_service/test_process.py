"""A drafter as a process: its ready line, its one-line errors, its exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specwire.v1 import common_pb2, draft_pb2_grpc

LIMIT_S = 120


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "draft_service", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def test_a_ready_line_a_healthy_service_and_a_clean_end() -> None:
    with process("scripted:7", "--json") as drafter:
        assert drafter.stdout is not None
        ready = json.loads(drafter.stdout.readline())
        assert ready["model"] == "scripted:7"
        with grpc.insecure_channel(ready["address"]) as channel:
            stub = draft_pb2_grpc.DraftServiceStub(channel)
            assert stub.GetModelInfo(common_pb2.GetModelInfoRequest(), timeout=LIMIT_S).vocabulary == 64
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "specwire.v1.DraftService"):
                answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=LIMIT_S)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        drafter.send_signal(signal.SIGTERM)
        out, err = drafter.communicate(timeout=LIMIT_S)
    assert (drafter.returncode, out) == (0, "")
    assert "Traceback" not in err


def test_an_open_link_does_not_keep_it_from_ending() -> None:
    with process("scripted:7") as drafter:
        assert drafter.stdout is not None
        address = drafter.stdout.readline().split()[-1]
        with grpc.insecure_channel(address) as channel:
            over = threading.Event()
            call = draft_pb2_grpc.DraftServiceStub(channel).Connect(silence(over), timeout=LIMIT_S)
            draft_pb2_grpc.DraftServiceStub(channel).GetModelInfo(common_pb2.GetModelInfoRequest(), timeout=LIMIT_S)
            drafter.send_signal(signal.SIGINT)
            with pytest.raises(grpc.RpcError) as raised:
                next(call)
            over.set()
            _, err = drafter.communicate(timeout=LIMIT_S)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert drafter.returncode == 0
    assert "Traceback" not in err


def silence(over: threading.Event) -> Iterator[object]:
    """Requests of a peer that stays connected and says nothing."""
    over.wait(LIMIT_S)
    yield from ()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["/no/such/model"], 1, "there is no such directory"),
        (["scripted:x"], 1, "model 'scripted:x'"),
        (["scripted:7", "--listen", "0.0.0.0:0"], 2, "--insecure"),
        (["scripted:7", "--listen", "nowhere"], 2, "listen: must be HOST:PORT"),
        (["scripted:7", "--slots", "0"], 2, "slots: must be from 1 to 1024, not 0"),
        (["scripted:7", "--context", "1"], 2, "context: must be at least 2, not 1"),
        (["scripted:7", "--dtype", "int3"], 2, "must be one of auto, float32, bfloat16, not 'int3'"),
        ([], 2, "the following arguments are required: MODEL"),
    ],
)
def test_errors_are_one_line_and_have_their_code(arguments: list[str], code: int, message: str) -> None:
    with process(*arguments) as drafter:
        out, err = drafter.communicate(timeout=LIMIT_S)
    assert (drafter.returncode, out) == (code, "")
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err


def test_a_port_in_use_is_named(taken_address: str) -> None:
    with process("scripted:7", "--listen", taken_address) as drafter:
        _, err = drafter.communicate(timeout=LIMIT_S)
    assert drafter.returncode == 1
    assert err.splitlines() == [  # told before the model loads
        f"specwire draft: error: listen: cannot listen on {taken_address}: the port is in use"
    ]


def test_asking_for_help_does_not_load_torch() -> None:
    check = "import sys; import draft_service.__main__; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=LIMIT_S)
