"""However a stack ends, in order or not, it says why in one line and leaves no process and no file.

So do the stacks that `demo` and `generate` start.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.harness.child import descendants, end_tree
from tests.integration.stack_process import DRAFT, END_LIMIT, ROOT, START_LIMIT, TARGET, failure, running
from tests.orchestrator.http.front import TEMPLATE
from tests.wait import eventually

ANY_PORT = ("--listen", "127.0.0.1:0")
PAIR = ("--target", TARGET, "--draft", DRAFT)


@pytest.mark.parametrize("processes", [1, 4])
def test_ctrl_c_during_the_start(processes: int) -> None:
    """As soon as it says anything, and once so many of its processes run."""
    with running("up", *ANY_PORT, *PAIR) as command:
        assert eventually(lambda: bool(command.said()) and len(command.family()) >= processes, START_LIMIT)
        command.process.send_signal(signal.SIGINT)
        assert command.wait(END_LIMIT) in (0, 128 + signal.SIGINT)
        assert command.nothing_left(), command.family()
        assert "Traceback" not in command.said()


def test_a_second_ctrl_c_ends_it_on_the_spot() -> None:
    with running("up", *ANY_PORT, *PAIR) as command:
        assert command.line()
        assert command.family()
        command.process.send_signal(signal.SIGINT)
        command.process.send_signal(signal.SIGINT)
        assert command.wait(END_LIMIT) in (0, 128 + signal.SIGINT)
        assert command.nothing_left(), command.family()
        assert "Traceback" not in command.said()


def test_its_processes_die_with_it() -> None:
    with running("up", *ANY_PORT, *PAIR) as command:
        assert command.line()
        command.process.kill()
        command.wait(END_LIMIT)
        assert eventually(lambda: not command.family(), END_LIMIT), command.family()


def test_a_dead_redis_ends_the_stack_with_a_reason() -> None:
    with running("up", *ANY_PORT, *PAIR) as command:
        assert command.line().startswith("specwire: ready on 127.0.0.1:")
        os.kill(command.pid_of("redis-server"), signal.SIGKILL)
        assert command.wait(END_LIMIT) == 1
        assert command.last_line() == "specwire up: error: the private Redis ended with exit code -9"
        assert command.nothing_left(), command.family()


@pytest.mark.parametrize("role", ["target", "draft"])
def test_an_unknown_model(role: str) -> None:
    models = {"target": TARGET, "draft": DRAFT, role: "./no/such/model"}
    error = failure("up", *ANY_PORT, "--target", models["target"], "--draft", models["draft"])
    service = {"target": "verifier", "draft": "drafter"}[role]
    assert error.startswith(f"specwire up: error: {service}: ")
    assert "no/such/model" in error


# Commands that start one of their own

PROMPTS = [{"name": "one", "text": "1 2 3"}, {"name": "two", "text": "5 6"}]


def test_demo_compares_texts_and_speeds(tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS))
    with running("demo", "--prompts", str(tmp_path / "prompts.json"), "--max-tokens", "40", *PAIR) as command:
        assert command.process.stdout is not None
        output = command.process.stdout.read()
        assert command.wait() == 0, command.said()
        assert command.nothing_left(), command.family()
    assert "--- temperature 0, one\n1 2 3" in output
    assert "--- temperature 0.8, two\n5 6" in output
    assert output.count("[40 tokens, ") == 4
    assert "head" not in output
    assert output.rstrip().endswith("texts identical, token for token: 4 of 4")
    assert "\x1b" not in output


def test_generate_starts_a_stack_of_its_own_and_ends_it() -> None:
    with running("generate", "1 2 3", "--max-tokens", "30", "--stop", "no such text", *PAIR) as command:
        assert len(command.line().split()) == 30
        assert command.wait() == 0, command.said()
        assert "30 tokens in " in command.last_line()
        assert command.nothing_left(), command.family()


# A command whose cleaning up takes so long that a second signal comes meanwhile, behind the end of its event loop.
SLOW_TO_CLEAN = """
import asyncio, sys, time
from deploy.cli import main

leave_nothing = main._leave_nothing

def slowly(folder):
    print("cleaning", flush=True)
    for _ in range(100):
        time.sleep(0.01)
    leave_nothing(folder)

async def work(folder):
    print(folder, flush=True)
    await asyncio.sleep(600)

main._leave_nothing = slowly
sys.exit(main.run_owned("up", work))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_that_comes_late_leaves_nothing_either(number: signal.Signals) -> None:
    command = [sys.executable, "-c", SLOW_TO_CLEAN]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        process.send_signal(number)
        assert process.stdout.readline() == "cleaning\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=END_LIMIT)
    assert (process.returncode, errors) == (128 + number, "")
    assert folder.name.startswith("specwire-")
    assert not folder.exists()


# ----------------------------------------------------------------------------------------------------------------------
# `specwire chat` with a stack of its own: it talks, and leaves nothing behind, whatever ends it.

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
