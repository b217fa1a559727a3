"""A `specwire` command as a process, and everything that it starts."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from bench.harness.child import descendants, end_tree
from tests.wait import eventually, marked

ROOT = Path(__file__).resolve().parents[2]
# Seconds: a machine that is busy beside the tests may stand still for two minutes.
START_LIMIT = 240.0
END_LIMIT = 240.0
TARGET = "scripted:7:delay_ms=20"
DRAFT = "scripted:7:agree=0.8"


class Command:
    """A running command. Every process below it carries a mark in its environment, whoever its parent is by now."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        self._mark = f"SPECWIRE_TEST={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        environment = {**os.environ, name: value, "TMPDIR": str(folder), "HOME": str(folder), "OMP_NUM_THREADS": "1"}
        for name in ("SPECWIRE_ADDRESS", "XDG_RUNTIME_DIR"):  # what it lists is in its folder
            environment.pop(name, None)
        self._seen: set[int] = set()
        self.folder = folder
        self.errors = folder / "stderr"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deploy", *arguments],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def line(self) -> str:
        """Return the next line of stdout; empty once it is closed."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def ready(self) -> dict[str, Any]:
        """Return what its ready line says; of a command with --json."""
        line = self.line()
        assert line, self.said()
        told: dict[str, Any] = json.loads(line)
        return told

    def wait(self, limit: float = START_LIMIT) -> int:
        return self.process.wait(limit)

    def said(self) -> str:
        return self.errors.read_text()

    def last_line(self) -> str:
        return self.said().rstrip().rpartition("\n")[2]

    def family(self) -> dict[int, str]:
        """Return the command lines of all its living processes: those below it, and orphans by their mark.

        Some programs overwrite their environment with their title (Redis does), so that a mark alone is not enough.
        """
        self._seen.update(descendants(self.process.pid))
        found = {}
        for pid in self._seen.union(marked(self._mark)):
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if command:  # a zombie has none
                    found[pid] = command
        return found

    def pid_of(self, part: str) -> int:
        """Return the one process whose command line has `part`."""
        found = [pid for pid, command in self.family().items() if part in command]
        assert len(found) == 1, (part, self.family())
        return found[0]

    def nothing_left(self) -> bool:
        """Whether no process and no folder of ours is left, within END_LIMIT."""
        return eventually(lambda: not self.family(), END_LIMIT) and not list(self.folder.glob("specwire-*"))


def listeners(pids: Iterable[int]) -> tuple[list[tuple[str, int]], list[tuple[str, str]]]:
    """Sockets of these processes that wait for connections or datagrams: all, (process, port), and those that are not
    on loopback, (process, address).
    """
    found, away = list[tuple[str, int]](), list[tuple[str, str]]()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for each in process.net_connections("inet"):
                if each.laddr and not each.raddr:
                    address = str(each.laddr.ip).removeprefix("::ffff:")
                    found.append((process.name(), int(each.laddr.port)))
                    away += [] if ipaddress.ip_address(address).is_loopback else [(process.name(), address)]
    return found, away


@contextmanager
def running(*arguments: str) -> Iterator[Command]:
    """A command; whatever happens, it is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="sw-", dir="/tmp") as name:
        command = Command(arguments, Path(name))
        try:
            yield command
        finally:
            if command.process.poll() is None:
                end_tree(command.process.pid)
            command.process.wait(END_LIMIT)
            if command.process.stdout is not None:
                command.process.stdout.close()


def failure(*arguments: str) -> str:
    """The one line with which a command that must fail does so, with exit code 1, and leaves nothing."""
    with running(*arguments) as command:
        assert command.wait() == 1, command.said()
        assert command.nothing_left(), command.family()
        assert command.line() == ""
        assert "Traceback" not in command.said()
        return command.last_line()
