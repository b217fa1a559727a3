"""`specwire chat` as its user sees it: in a terminal of its own, against a real stack; and from a pipe."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from specwire.core.messages import FinishReason
from tests.orchestrator.http.front import TEMPLATE
from tests.orchestrator.stack import DRAFT, TARGET, stack

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0
# From the prompt until it is read behind it: Python keeps an interrupt that comes in between until the next line.
READS_S = 0.5
# Its terminal becomes the one that Ctrl-C comes from.
OWNING = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
SLOW = f"{TARGET}:delay_ms=10"


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "deploy", "chat", *words]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPECWIRE_")}
    return {**kept, "TERM": "dumb", "NO_COLOR": "1"}


class Terminal:
    """A command in a terminal. `shown` is all that it has written."""

    def __init__(self, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        self.shown = ""
        self._at = 0
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNING, *command(*words)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=ROOT,
            env=environment(),
            start_new_session=True,
        )
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, text: str, times: int = 1) -> None:
        """Read until `text` has come so often since the last call's; AssertionError at the limit."""
        end = time.monotonic() + LIMIT_S
        for _ in range(times):
            while (found := self.shown.find(text, self._at)) < 0:
                ready = select.select([self._ours], [], [], max(0.0, end - time.monotonic()))[0]
                assert ready, f"no {text!r} in {self.shown[self._at :]!r}"
                self.shown += os.read(self._ours, 4096).decode(errors="replace")
            self._at = found + len(text)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)
        os.close(self._ours)


def talk(address: str) -> tuple[str, int]:
    """A conversation in which Ctrl-C ends an answer, then drops a line; what was shown, and the exit code."""
    with closing(Terminal("--address", address, "--max-tokens", "4000", "--ignore-eos")) as terminal:
        return converse(terminal)


def converse(terminal: Terminal) -> tuple[str, int]:
    terminal.until("> ")
    terminal.type("hello\n")
    terminal.until(" 1")  # of the answer: its words are numbers
    terminal.until(" ", 10)
    terminal.type("\x03")
    terminal.until("end: cancelled")
    terminal.until("> ")
    time.sleep(READS_S)
    terminal.type("dropped\x03")
    terminal.until("> ")
    terminal.type("/nonsense\n")
    terminal.until("/clear begins anew")
    terminal.until("> ")
    terminal.type("again\n")
    terminal.until(" ", 20)
    terminal.type("\x03")
    terminal.until("end: cancelled")
    terminal.type("/exit\n")
    return terminal.shown, terminal.process.wait(LIMIT_S)


async def test_ctrl_c_ends_the_answer_and_not_the_program() -> None:
    async with stack(SLOW, DRAFT, chat_template=TEMPLATE) as running:
        shown, code = await asyncio.to_thread(talk, running.client.address)
        sessions = list(running.orchestrator.orchestrator.sessions.values())
    assert code == 0
    assert "Traceback" not in shown
    ends = [driver.view.output.end for driver in sessions]
    assert [end.reason for end in ends if end] == [FinishReason.CANCELLED] * 2
    first, second = sessions
    # The second turn's prompt has the first one's answer, as far as it came.
    tokens = [*first.view.record.prompt, *first.view.output.tokens]
    assert list(second.view.record.prompt[: len(tokens)]) == tokens


async def test_lines_from_a_pipe() -> None:
    async with stack(TARGET, chat_template=TEMPLATE) as running:
        address = running.client.address
        process = await asyncio.create_subprocess_exec(
            *command("--address", address, "--max-tokens", "5", "--ignore-eos", "--system", "Be brief."),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=environment(),
        )
        async with asyncio.timeout(LIMIT_S):
            out, err = await process.communicate(b"one\n\n/clear\none\nthree\n")
        sessions = running.orchestrator.orchestrator.sessions.values()
        ends = [driver.view.record.stopping.max_tokens for driver in sessions]
    first, second, third = out.decode().splitlines()
    assert first == second
    assert first != third
    assert len(first.split()) == 5
    assert err.decode().count("5 tokens in ") == 3
    assert (process.returncode, ends) == (0, [5, 5, 5])


@pytest.mark.parametrize(
    ("running", "instead"),
    [
        (True, "or start the stack with --chat-template FILE"),
        (False, "give --chat-template FILE, or take a real model: "),
    ],
)
async def test_a_model_without_a_template_is_refused(running: bool, instead: str) -> None:
    async with stack(TARGET) as there:
        words = ("--address", there.client.address) if running else ("--target", TARGET, "--no-draft")
        done = await asyncio.to_thread(
            subprocess.run,
            command(*words),
            cwd=ROOT,
            env=environment(),
            input="one\n",
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    assert (done.returncode, done.stdout) == (1, "")
    told = "scripted:7 has no chat template, so it cannot chat; complete a text instead (specwire generate), "
    assert done.stderr.splitlines()[-1].startswith(f"specwire chat: error: {told}{instead}")
