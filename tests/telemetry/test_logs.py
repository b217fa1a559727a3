"""Log lines, by themselves and as processes write them."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specwire.client import Client
from specwire.core.invalid import InvalidParameter
from specwire.telemetry.logs import JsonLines, TextLines, message_of, tell
from specwire.telemetry.options import Telemetry
from tests.ports import free_port
from tests.telemetry.stack import observed

ROOT = Path(__file__).resolve().parents[2]
TARGET = "scripted:7:vocab=64"
# What the scripted vocabulary writes for the prompt: no log may have it unasked.
PROMPT = [5, 6, 7]


def record(message: str, *args: object, **extra: str) -> logging.LogRecord:
    return logging.getLogger("a.b").makeRecord("a.b", logging.WARNING, "f", 1, message, args, None, extra=extra)


def test_a_json_line_has_the_session_and_no_line_break(caplog: pytest.LogCaptureFixture) -> None:
    tell(logging.getLogger("a.b"), "abcdefghijkl", "x\ny", level=logging.WARNING)
    (made,) = caplog.records
    made.created, made.msecs = 0.25, 250.0
    line = JsonLines("verifier").format(made)
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "warning",
        "service": "verifier",
        "logger": "a.b",
        "message": "session abcdefgh: x\ny",
        "session": "abcdefgh",
    }


def test_an_error_comes_with_its_traceback() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        made = logging.getLogger("a").makeRecord("a", logging.ERROR, "f", 1, "it failed", (), sys.exc_info())
    assert "ValueError: no" in json.loads(JsonLines("x").format(made))["error"]


def test_texts_stand_quoted_behind_a_text_line() -> None:
    assert TextLines().format(record("begun", prompt="a\nb")).endswith("WARNING a.b: begun prompt='a\\nb'")


def test_either_form_says_its_message() -> None:
    assert message_of(JsonLines("x").format(record("error: no"))) == "error: no"
    assert [message_of(line) for line in ("plain", "3", '{"a": 1}')] == ["plain", "3", '{"a": 1}']


@pytest.mark.parametrize(
    ("name", "value", "option"),
    [
        ("log_format", "xml", "log-format"),
        ("log_level", "loud", "log-level"),
        ("traces", "localhost:4318", "traces"),
        ("traces", "ftp://x", "traces"),
    ],
)
def test_a_wrong_option_is_named(name: str, value: str, option: str) -> None:
    with pytest.raises(InvalidParameter, match=f"{option}: .*{value}"):
        Telemetry(**{name: value})


def up(*flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "deploy", "up", "--target", TARGET, "--redis-url", "memory:"]
    listen = ["--listen", "127.0.0.1:0", "--http", "none", "--json", "--log-format", "json", "--log-level", "info"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("SPECWIRE_")}
    return subprocess.Popen(
        [*command, *listen, *flags], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_stack_logs_json_of_all_its_services_and_no_prompt() -> None:
    with up("--metrics", f"127.0.0.1:{free_port(row=3)}") as stack:
        try:
            assert stack.stdout is not None
            address = json.loads(stack.stdout.readline())["address"]
            with Client(address) as client:
                assert len(client.complete(PROMPT, max_tokens=6, ignore_eos=True).tokens) == 6
        finally:
            stack.send_signal(signal.SIGTERM)
            _, errors = stack.communicate(timeout=120.0)
    assert stack.returncode == 0
    lines: list[dict[str, Any]] = [json.loads(line) for line in errors.splitlines()]
    assert {line["service"] for line in lines} == {"orchestrator", "verifier"}
    assert sum("figures are at http://127.0.0.1:" in line["message"] for line in lines) == 2
    begun, ended = [line for line in lines if line["message"].startswith("session ")]
    assert begun["session"] == ended["session"] == begun["message"].split()[1].rstrip(":")
    assert "begun with 3 tokens" in begun["message"]
    assert "ended (length) with 6 tokens" in ended["message"]
    assert not any({"prompt", "output"} & line.keys() for line in lines)


async def test_an_orchestrator_that_is_told_to_logs_prompts_and_outputs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "orchestrator.sessions")
    async with observed(log_prompts=True) as stack:
        completion = await stack.client.complete(PROMPT, max_tokens=6, ignore_eos=True)
    begun, ended = [made for made in caplog.records if made.name == "orchestrator.sessions"]
    assert begun.__dict__["prompt"]
    assert ended.__dict__["output"] == completion.text
