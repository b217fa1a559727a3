"""A Ray cluster of one machine, by the commands of docs/DEPLOY.md: on loopback, with a token, deployed to."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.documents import ROOT, all_blocks
from tests.integration.stack_process import listeners
from tests.orchestrator.redis_for_tests import RedisServer
from tests.ports import free_port
from tests.wait import eventually, marked

LIMIT_S = 400.0
FILE = "deploy/ray/one-machine.yaml"
MODELS = {"demo_pair/target": '"scripted:7:vocab=64"', "demo_pair/draft": '"scripted:7:vocab=64:agree=0.8"'}
[BLOCK] = [block for block in all_blocks() if block.page == "docs/DEPLOY.md" and "ray start" in block.text]


class Machine:
    """Whatever is started here, and below, carries a mark in its environment."""

    def __init__(self, folder: Path, redis_port: str) -> None:
        self.folder = folder
        self._mark = uuid.uuid4().hex
        self._ports = {"6379": redis_port, **{port: free_port() for port in ("6380", "50051", "8000")}}
        (folder / "bin").mkdir()
        command = folder / "bin" / "specwire"
        command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m deploy "$@"\n')
        command.chmod(0o755)
        text = self.placed((ROOT / FILE).read_text())
        for model, scripted in MODELS.items():
            assert model in text
            text = text.replace(model, scripted)
        (folder / FILE).parent.mkdir(parents=True)
        (folder / FILE).write_text(text)

    def placed(self, text: str) -> str:
        for shown, port in self._ports.items():
            text = text.replace(shown, port)
        return text

    def run(self, commands: list[str]) -> str:
        """In one shell; what they print."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPECWIRE_", "RAY_"))}
        environment = {
            **kept,
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.folder),
            "RAY_TMPDIR": str(self.folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "SPECWIRE_TEST_MARK": self._mark,
        }
        script = "set -e\n" + self.placed("\n".join(commands))
        with (self.folder / "said").open("w+") as said:  # a pipe would stay open for as long as Ray runs
            done = subprocess.Popen(
                ["bash", "-c", script],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
            ended = eventually(lambda: done.poll() is not None, LIMIT_S)
            said.seek(0)
            text = said.read()
            if not ended:
                done.kill()
                done.wait()
        assert ended, text
        assert done.returncode == 0, text
        return text

    def processes(self) -> list[int]:
        return marked(f"SPECWIRE_TEST_MARK={self._mark}")

    def gone(self) -> bool:
        for pid in (found := self.processes()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found


@pytest.fixture
def here() -> Iterator[Machine]:
    port = free_port()
    with RedisServer(port=port, bind="127.0.0.1"), tempfile.TemporaryDirectory(prefix="sw-", dir="/tmp") as name:
        machine = Machine(Path(name), port)
        try:
            yield machine
        finally:
            assert eventually(machine.gone, LIMIT_S)


def test_its_commands_do_what_the_page_says(here: Machine) -> None:
    *commands, last = BLOCK.commands()
    assert last == "ray stop"  # would end the Ray of other tests as well
    at = next(index for index, command in enumerate(commands) if "undeploy" in command)
    said = here.run(commands[:at])
    assert "orchestrators: created (0 -> 1)" in said
    assert "ready  127.0.0.1:" in said
    assert "60 tokens in " in said
    token = here.folder / ".ray" / "auth_token"
    assert token.stat().st_mode & 0o077 == 0
    found, away = listeners(here.processes())
    assert "gcs_server" in {name for name, _ in found}
    assert away == []
    setting = commands[0]
    assert setting.startswith("export ")
    assert "target: removed (1 -> 0)" in here.run([setting, commands[at]])
