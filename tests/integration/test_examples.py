"""What examples/ shows other services, against a whole stack: their text is the Python client's."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from specwire.client import Client
from tests.integration.stack_process import DRAFT, END_LIMIT, ROOT, TARGET, running

PROMPT = "1 2 3"
LIMIT_S = 60.0
NODE = ROOT / "examples" / "node"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    words = ("up", "--no-ray", "--json", "--listen", "127.0.0.1:0", "--target", TARGET, "--draft", DRAFT)
    with running(*words) as stack:
        yield str(json.loads(stack.line())["address"])
        stack.process.send_signal(signal.SIGINT)
        assert stack.wait(END_LIMIT) == 0, stack.said()


@pytest.fixture(scope="module")
def text(address: str) -> str:
    with Client(address) as client:
        return client.complete(PROMPT, max_tokens=60).text


def said_by(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.removesuffix("\n")


@pytest.mark.parametrize("name", ["asyncio_client", "blocking_client"])
def test_in_python(name: str, address: str, text: str) -> None:
    assert said_by(sys.executable, "-m", f"examples.{name}", address, PROMPT) == text


@pytest.mark.skipif(
    shutil.which("node") is None or not (NODE / "node_modules").is_dir(),
    reason="needs Node.js and what `make node` installs",
)
def test_in_node(address: str, text: str) -> None:
    assert said_by("node", str(NODE / "client.js"), address, PROMPT) == text


def test_errors_are_told(address: str) -> None:
    """A status, in one line, and an exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "examples.blocking_client", address, ""],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "INVALID_ARGUMENT" in done.stderr
