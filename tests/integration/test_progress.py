"""How far a start is, as a terminal shows it, and as a pipe and a program do not."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import demo_pair
from deploy.stack.processes import end_tree
from tests.integration.model_hub import MODEL, hub
from tests.integration.stack_process import END_LIMIT, ROOT, START_LIMIT, TARGET, running

UP = ("up", "--no-ray", "--listen", "127.0.0.1:0", "--http", "none", "--target", TARGET)


def on_a_terminal(*words: str, seen: Callable[[bytes], object] = lambda drawn: None, **more: str) -> tuple[str, str]:
    """What a command that serves writes to stdout, a pipe, until it is ready, and to the terminal that stderr is.

    seen: is told all that was drawn so far. more: environment variables.
    """
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 80))
    environment = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1", **more}
    environment.pop("COLUMNS", None)  # of the terminal that the tests run on
    command = [sys.executable, "-m", "deploy", *words]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=slave, text=True)
    os.close(slave)
    try:
        drawn = read_until_ready(process, master, seen)
        ready = process.stdout.readline() if process.stdout is not None else ""
        process.send_signal(signal.SIGINT)
        while chunk := read(master, END_LIMIT):
            drawn += chunk
        assert process.wait(END_LIMIT) == 0, drawn
    finally:
        if process.poll() is None:
            end_tree(process.pid)
        process.wait(END_LIMIT)
        if process.stdout is not None:
            process.stdout.close()
        os.close(master)
    return ready, drawn.decode()


def read_until_ready(process: subprocess.Popen[str], master: int, seen: Callable[[bytes], object]) -> bytes:
    assert process.stdout is not None
    drawn, end, told = b"", time.monotonic() + START_LIMIT, process.stdout.fileno()
    while time.monotonic() < end:
        readable, _, _ = select.select([master, told], [], [], 1.0)
        if master in readable:
            drawn += read(master, 0.0)
            seen(drawn)
        if told in readable:
            return drawn
    raise AssertionError(drawn)


def read(master: int, limit: float) -> bytes:
    """What the terminal gets within the limit; nothing once its process has ended."""
    try:
        return os.read(master, 1 << 16) if select.select([master], [], [], limit)[0] else b""
    except OSError:  # how a terminal says that nobody writes to it any more
        return b""


def test_a_stack_that_starts_shows_a_bar() -> None:
    ready, drawn = on_a_terminal(*UP)
    assert ready.startswith("specwire: ready on ")
    assert "starting [" in drawn
    assert "] 0/1  0:0" in drawn
    assert drawn.count("\rstarting") + drawn.count("\x1b[Jstarting") < 10 * START_LIMIT
    assert "specwire: verifier: ready\r\n" in drawn


@pytest.mark.parametrize("words", [UP, ("verify", str(demo_pair.TARGET))], ids=["up", "verify"])
def test_a_program_gets_none(words: Sequence[str]) -> None:
    ready, drawn = on_a_terminal(*words, "--json")
    assert json.loads(ready)["address"]
    assert "\x1b" not in drawn
    assert "[" not in drawn
    assert "%" not in drawn


def test_a_stack_that_fetches_its_model_says_how_much_there_is(tmp_path: Path) -> None:
    """The second half of the weights comes when the terminal has told of the first, or of what a disk has of it."""
    rest, words = threading.Event(), ("up", "--no-ray", "--no-draft", "--listen", "127.0.0.1:0", "--http", "none")
    with hub(demo_pair.TARGET, rest) as url:
        ready, drawn = on_a_terminal(
            *(*words, "--target", MODEL),
            seen=lambda drawn: rest.set() if parts_of(drawn.decode(errors="replace")) else None,
            HF_ENDPOINT=url,
            HF_HUB_OFFLINE="0",
            HF_HOME=str(tmp_path),
            HF_HUB_DISABLE_XET="1",
            HF_HUB_ETAG_TIMEOUT="60",
            HF_HUB_DOWNLOAD_TIMEOUT="60",
        )
    assert ready.startswith("specwire: ready on ")
    assert parts_of(drawn), drawn


def parts_of(drawn: str) -> list[float]:
    """Megabytes that were told, of those that are more than the small files and less than all."""
    told = [float(amount) for amount in re.findall(r"loading verifier, (\d+\.\d) MB fetched", drawn)]
    return [amount for amount in told if 1.0 < amount < 12.0]


def test_loading_weights_shows_a_bar() -> None:
    ready, drawn = on_a_terminal("verify", str(demo_pair.TARGET))
    assert " ready on " in ready
    assert "Loading weights" in drawn


def test_a_pipe_gets_lines_only() -> None:
    with running("verify", str(demo_pair.TARGET)) as command:
        assert " ready on " in command.line()
        assert "\r" not in command.said()
        assert "%" not in command.said()


TRAINING = """
import itertools, torch
from transformers import LlamaConfig, LlamaForCausalLM
from demo_pair.train.draft import imitate
from specwire.lm.training.distillation import Schedule
tiny = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
target, drafter = (LlamaForCausalLM(LlamaConfig(**tiny, tie_word_embeddings=True)) for _ in range(2))
imitate(drafter, target.eval(), itertools.repeat(torch.ones(2, 17, dtype=torch.long)), Schedule(1e-3, 2, 20, 5))
"""
BENCH = """
import time
from bench.harness.interleave import tracked
from specwire.rpc.process import say
for number in tracked(range(20), 20):
    time.sleep(0.01)
    say(f"prompt {number}")
"""


@pytest.mark.parametrize(
    ("program", "what", "line"), [(TRAINING, "drafter", "step 20/20"), (BENCH, "measuring", "prompt 19")]
)
def test_training_and_benches_show_bars_on_terminals_only(program: str, what: str, line: str) -> None:
    words, environment = [sys.executable, "-c", program], {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    piped = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=END_LIMIT * 3)
    assert piped.returncode == 0, piped.stderr
    assert line in piped.stdout + piped.stderr
    assert what not in piped.stdout + piped.stderr
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 100))
    process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=slave, stderr=slave)
    os.close(slave)
    drawn = b""
    while chunk := read(master, END_LIMIT * 3):
        drawn += chunk
    os.close(master)
    assert process.wait(END_LIMIT) == 0, drawn
    assert f"{what} [".encode() in drawn
    assert f"\x1b[J{line}".encode() in drawn or f"\n{line}".encode() in drawn
