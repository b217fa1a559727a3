"""`specwire chat` with a stack of its own: it talks, and leaves nothing behind, whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.harness.child import descendants, end_tree
from tests.integration.stack_process import END_LIMIT, ROOT
from tests.orchestrator.http.front import TEMPLATE
from tests.wait import eventually

CHAT = (sys.executable, "-m", "deploy", "chat")
STACK = ("--target", "scripted:7", "--draft", "scripted:7:agree=0.8")


@contextmanager
def chatting(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A chat that waits for its second line."""
    (folder / "template").write_text(TEMPLATE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPECWIRE_")}
    process = subprocess.Popen(
        [*CHAT, *STACK, "--chat-template", str(folder / "template"), "--max-tokens", "6", "--ignore-eos"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    with process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("zero\n")
            process.stdin.flush()
            assert len(process.stdout.readline().split()) == 6
            yield process
        finally:
            if process.poll() is None:
                end_tree(process.pid)


def gone(pids: list[int]) -> bool:
    return eventually(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids), END_LIMIT)


def test_it_talks_and_leaves_nothing(tmp_path: Path) -> None:
    with chatting(tmp_path) as process:
        family = descendants(process.pid)
        out, err = process.communicate("one\ntwo\n", timeout=END_LIMIT)
    assert process.returncode == 0
    assert [len(line.split()) for line in out.splitlines()] == [6, 6]
    assert "Traceback" not in err
    assert len(family) >= 4  # the stack, its Redis, and two services
    assert gone(family)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_signal_at_the_prompt(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with chatting(tmp_path) as process:
        family = descendants(process.pid)
        process.send_signal(number)
        assert process.wait(END_LIMIT) == code
        assert gone(family)
