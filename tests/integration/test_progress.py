"""How far something is, as a terminal shows it, and as a pipe and a program do not."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Sequence

import pytest

import demo_pair
from bench.harness.child import end_tree
from tests.integration.stack_process import END_LIMIT, ROOT, START_LIMIT, TARGET, running

UP = ("up", "--listen", "127.0.0.1:0", "--http", "none", "--target", TARGET)


def on_a_terminal(*words: str) -> tuple[str, str]:
    """What a command that serves writes to stdout, a pipe, until it is ready, and to the terminal that stderr is."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 80))
    environment = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    environment.pop("COLUMNS", None)  # of the terminal that the tests run on
    command = [sys.executable, "-m", "deploy", *words]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=slave, text=True)
    os.close(slave)
    try:
        drawn = read_until_ready(process, master)
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


def read_until_ready(process: subprocess.Popen[str], master: int) -> bytes:
    assert process.stdout is not None
    drawn, end, told = b"", time.monotonic() + START_LIMIT, process.stdout.fileno()
    while time.monotonic() < end:
        readable, _, _ = select.select([master, told], [], [], 1.0)
        if master in readable:
            drawn += read(master, 0.0)
        if told in readable:
            return drawn
    raise AssertionError(drawn)


def read(master: int, limit: float) -> bytes:
    """What the terminal gets within the limit; nothing once its process has ended."""
    try:
        return os.read(master, 1 << 16) if select.select([master], [], [], limit)[0] else b""
    except OSError:  # how a terminal says that nobody writes to it any more
        return b""


@pytest.mark.parametrize("words", [UP, ("verify", str(demo_pair.TARGET))], ids=["up", "verify"])
def test_a_program_gets_none(words: Sequence[str]) -> None:
    ready, drawn = on_a_terminal(*words, "--json")
    assert json.loads(ready)["address"]
    assert "\x1b" not in drawn
    assert "[" not in drawn
    assert "%" not in drawn


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
import itertools, tempfile, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from demo_pair.train.target import next_token_loss, taught
from specwire.lm.training.loop import Schedule
tiny = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model, windows = LlamaForCausalLM(LlamaConfig(**tiny, tie_word_embeddings=True)), torch.ones(2, 17, dtype=torch.long)
with tempfile.TemporaryDirectory() as work:
    order, schedule = itertools.repeat(windows), Schedule(1e-3, 2, 20, 5)
    taught(model, order, lambda each: next_token_loss(model, each), windows, schedule, Path(work))
"""


def test_training_shows_a_bar_on_terminals_only() -> None:
    words, environment = [sys.executable, "-c", TRAINING], {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    piped = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=END_LIMIT * 3)
    assert piped.returncode == 0, piped.stderr
    said = piped.stdout + piped.stderr
    assert "step 20/20" in said
    assert "training" not in said
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 100))
    process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=slave, stderr=slave)
    os.close(slave)
    drawn = b""
    while chunk := read(master, END_LIMIT * 3):
        drawn += chunk
    os.close(master)
    assert process.wait(END_LIMIT) == 0, drawn
    assert b"training [" in drawn
    assert b"\x1b[Jstep 20/20" in drawn or b"\nstep 20/20" in drawn
