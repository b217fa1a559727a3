"""Every command block of README, docs/ and the other pages does what it says (tests/documents.py has the rules).

Pages are run: their commands in their order, as a reader would type them into a few terminals. What a page takes for
granted is provided:

- `specwire` is this checkout's. MODEL is a scripted model, and so is the pair of `specwire up` where none is named; it
  has the chat template that it needs beside it.
- Ports on 127.0.0.1 and 0.0.0.0 are free ones, the same port the same one all over. On 6379 there is a Redis.
- What serves (`up`, `verify`, `draft`, `orchestrate`, `edge`, `registry`) goes on in the background from its ready line
  to the end of the page, or to that of the last page if another begins with the same command. It must then end with
  exit code 0. `specwire up` alone has the default ports; others that would like them get others.
- A certificate, a key and an authority, keys of callers, a chat template and two models lie about.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import yaml

from bench.harness.certificates import Authority
from bench.harness.child import end_tree
from deploy.stack.processes import bound
from tests.documents import PROMPT, ROOT, Block, all_blocks
from tests.orchestrator.redis_for_tests import RedisServer
from tests.ports import free_port

ADDRESS = re.compile(r"\b(?:127\.0\.0\.1|0\.0\.0\.0):([1-9]\d*)\b")
SERVES = ("up", "verify", "draft", "orchestrate", "edge", "registry")
UP = "specwire up"
ANYWHERE = "127.0.0.1:0"
MODEL = "scripted:7"
DRAFT = "scripted:7:agree=0.8"
READY = re.compile(r" ready(?: on |, joined )")
# Only what hangs takes so long, on a busy machine too.
READY_S, COMMAND_S, END_S = 240.0, 240.0, 120.0


class PageFailed(AssertionError):
    """A block does not do what its page says; the message names it."""


class Service:
    """A command that serves, started."""

    def __init__(self, command: str, folder: Path, environment: dict[str, str]) -> None:
        self.command = command
        self._said = folder / f"service-{time.monotonic_ns()}"
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                bound(["bash", "-c", f"exec {command}"], signal.SIGTERM),
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    def await_ready(self) -> None:
        end = time.monotonic() + READY_S
        while READY.search(self.said()) is None:
            if self._process.poll() is not None or time.monotonic() > end:
                raise PageFailed(f"{self.command}\nis not ready: {self.said()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """As Ctrl-C does."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            code = None
            end_tree(self._process.pid)
            self._process.wait(END_S)
        if code != 0:
            raise PageFailed(f"{self.command}\nended with {code}: {self.said()}")

    def said(self) -> str:
        return self._said.read_text(errors="replace")


class Desk:
    """Where pages are tried: a folder, ports, and what serves.

    kept: commands that go on serving when their page is over, because another page begins with the same.
    """

    def __init__(self, folder: Path, redis_port: str, kept: Collection[str]) -> None:
        self._folder = folder
        self._ports = {"6379": redis_port}
        self._kept = {self.placed(command) for command in kept}
        self._services: dict[str, Service] = {}
        up = {"target": MODEL, "chat_template": str(ROOT / "examples" / "chatml.jinja")}
        (folder / "config.yaml").write_text(yaml.safe_dump({"up": up}))
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SPECWIRE_")},
            "PATH": f"{folder / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SPECWIRE_CONFIG": str(folder / "config.yaml"),
            "XDG_RUNTIME_DIR": str(folder),  # where commands find the stack that an earlier one of the page has started
            "TMPDIR": str(folder),
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
        }

    def close(self) -> None:
        self._stop(list(self._services.values()))

    def read(self, blocks: Iterable[Block]) -> None:
        """Run a page's blocks, then end what only this page needs. PageFailed names the block."""
        furnish(self._folder)
        try:
            for block in blocks:
                self._run(block)
        except BaseException:
            with suppress(PageFailed):  # the first error is the one that is reported
                self.close()
            raise
        self._stop([each for command, each in self._services.items() if command not in self._kept])

    def placed(self, text: str) -> str:
        """With our ports and models."""
        text = ADDRESS.sub(lambda found: f"127.0.0.1:{self._port(found.group(1))}", text)
        return re.sub(r"\bMODEL\b", MODEL, text)

    def _port(self, shown: str) -> str:
        return self._ports.setdefault(shown, free_port())

    def _run(self, block: Block) -> None:
        try:
            if block.language == "python":
                self._finish([sys.executable, "-c", self.placed(block.text)])
            elif block.language == "console":
                self._console(block)
            else:
                self._shell(block)
        except PageFailed as error:
            raise PageFailed(f"{block.name}: {error}") from None

    def _shell(self, block: Block) -> None:
        """Commands one after the other; those that serve and follow one another are started together."""
        starting: list[Service] = []
        for command in map(self.placed, block.commands()):
            words = shlex.split(command, comments=True)
            if words[0] == "specwire" and words[1] in SERVES:
                starting += self._served(shlex.join(words))
                continue
            _await_all(starting)
            self._finish(["bash", "-c", command])
        _await_all(starting)

    def _served(self, command: str) -> list[Service]:
        """The service, unless it serves already."""
        if command in self._services:
            return []
        self._services[command] = Service(command, self._folder, self._surroundings(command))
        return [self._services[command]]

    def _surroundings(self, command: str) -> dict[str, str]:
        """The first of those that listen on the same port by default gets it, the others any other."""
        if command != UP:
            return {**self._environment, "SPECWIRE_LISTEN": ANYWHERE}
        here, http = self.placed("127.0.0.1:50051"), self.placed("127.0.0.1:8000")
        return {**self._environment, "SPECWIRE_LISTEN": here, "SPECWIRE_HTTP": http, "SPECWIRE_DRAFT": DRAFT}

    def _stop(self, services: list[Service]) -> None:
        """End them, those that were started later first."""
        self._services = {command: each for command, each in self._services.items() if each not in services}
        with ExitStack() as stops:
            for service in services:
                stops.callback(service.stop)

    def _finish(self, words: list[str]) -> str:
        """What a program prints; PageFailed unless it succeeds within COMMAND_S."""
        try:
            done = subprocess.run(
                words,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=COMMAND_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise PageFailed(f"{words[-1]}\ndid not end within {COMMAND_S:g} s") from error
        if done.returncode != 0:
            raise PageFailed(f"{words[-1]}\nended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def _console(self, block: Block) -> None:
        """Commands, each followed by what it prints: ... stands for the rest of a line, alone for any lines."""
        for part in re.split(rf"^{re.escape(PROMPT)}", block.text, flags=re.MULTILINE)[1:]:
            command, _, wanted = part.partition("\n")
            printed = self._finish(["bash", "-c", self.placed(command)])
            pattern = "".join(map(_pattern, wanted.splitlines()))
            if re.fullmatch(pattern, printed.rstrip() + "\n") is None:
                raise PageFailed(f"{command}\nprints\n{printed}\nand not\n{wanted}")


def _pattern(line: str) -> str:
    return r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(re.escape("..."), ".*") + r"\n"


def _await_all(starting: list[Service]) -> None:
    while starting:
        starting.pop(0).await_ready()


def shared(blocks: Iterable[Block]) -> set[str]:
    """Commands that serve on more than one page, as `shlex.join` writes them."""
    pages: dict[str, set[str]] = {}
    for block in blocks:
        for command in block.commands() if block.is_run else []:
            pages.setdefault(shlex.join(shlex.split(command, comments=True)), set()).add(block.page)
    return {command for command, where in pages.items() if len(where) > 1}


def furnish(folder: Path) -> None:
    """What the pages' commands name, as a page finds it: the one before may have written over it."""
    if not (folder / "bin").exists():
        _furnish_once(folder)
    (folder / "keys").touch(0o600)
    (folder / "keys").write_text("somebody a-token-of-some-length-0123456789\n")
    authority = Authority()
    (folder / "ca.pem").write_bytes(authority.pem)
    for name in ("server", "edge", "drafter", "o"):
        authority.sign().save(folder, name)


def _furnish_once(folder: Path) -> None:
    command = folder / "bin" / "specwire"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m deploy "$@"\n')
    command.chmod(0o755)
    (folder / "demo_pair").symlink_to(ROOT / "demo_pair")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "models").mkdir()
    (folder / "models" / "large").symlink_to(ROOT / "demo_pair" / "target")
    (folder / "models" / "small").symlink_to(ROOT / "demo_pair" / "draft")


BLOCKS = [block for block in all_blocks() if block.is_run]
PAGES = sorted({block.page for block in BLOCKS})


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    port = free_port()
    with (
        RedisServer(port=port, bind="127.0.0.1"),
        tempfile.TemporaryDirectory(prefix="sw-", dir="/tmp") as folder,
        closing(Desk(Path(folder), port, shared(BLOCKS))) as running,
    ):
        yield running


@pytest.mark.parametrize("page", PAGES)
def test_its_commands_do_what_it_says(page: str, desk: Desk) -> None:
    desk.read(block for block in BLOCKS if block.page == page)
