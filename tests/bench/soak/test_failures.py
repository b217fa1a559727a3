"""A soak, and a crowd, that something goes wrong with: in a line, and with the report so far where there is one."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self, cast

import grpc
import pytest

from bench.harness import services
from bench.harness.entry import first_failure
from bench.harness.runs import BenchError
from bench.harness.services import Process, RedisLog, ServiceProcess
from bench.soak import load as load
from bench.soak import run
from bench.soak.load import ServedLoad, SessionCrowd
from bench.soak.load_report import Memory
from bench.soak.monkey import Fault, FaultKind, Monkey
from bench.soak.rig import Rig
from specwire.client import AsyncClient, SpecwireError

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


@contextmanager
def started(part: Process) -> Iterator[Process]:
    try:
        assert part.process.stdout is not None
        part.process.stdout.readline()
        yield part
    finally:
        part.kill()


def hurt(part: Process, kind: FaultKind, folder: Path) -> list[str]:
    """What the monkey says is wrong once it has dealt with `part`."""
    log = RedisLog(folder)
    try:
        whole = Rig({"part 1": part}, {}, (), log, part, folder / "log")  # type: ignore[arg-type]  # no monkey looks
        monkey = Monkey(whole, 1, lambda _: None)
        asyncio.run(monkey._inflict(Fault(kind, "part 1", 0.0)))
    finally:
        log.kill()
    return monkey.wrong


def test_what_does_not_end_when_asked_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "END_LIMIT_S", 0.2)
    with started(Process([sys.executable, "-c", DEAF], os.environ, tmp_path / "said")) as part:
        assert hurt(part, FaultKind.LEAVE, tmp_path) == ["part 1: still there 0.2 s after it was asked to end"]


def test_what_does_not_come_back_is_told(tmp_path: Path) -> None:
    with started(ServiceProcess(("verify", "scripted:no"), os.environ, tmp_path / "said", "127.0.0.1:0")) as part:
        (wrong,) = hurt(part, FaultKind.KILL, tmp_path)
    assert "did not become ready" in wrong


def test_of_a_group_of_tasks_the_first_failure_for_users_is_told() -> None:
    gone = SpecwireError(grpc.StatusCode.UNAVAILABLE, "gone")
    group = ExceptionGroup("tasks", [ExceptionGroup("tasks", [gone]), ValueError("x")])
    with pytest.raises(BenchError, match="UNAVAILABLE: gone"), first_failure():
        raise group
    with pytest.raises(ExceptionGroup), first_failure():
        raise ExceptionGroup("tasks", [ValueError("x")])


class Silent:
    """In place of a client."""

    def __init__(self, _: str) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...


def test_a_crowd_that_does_not_begin_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def no_services(*_: object) -> Iterator[ServedLoad]:
        yield ServedLoad("nowhere", "nowhere", Memory({}, {}, cast(RedisLog, None)))

    async def until_all_run(*_: object) -> None:
        raise BenchError("only 3 sessions began")

    monkeypatch.setattr(load, "served", no_services)
    monkeypatch.setattr(load, "_until_all_run", until_all_run)
    monkeypatch.setattr(load, "AsyncClient", Silent)
    assert load.main(["--idle", "0", "--out", str(tmp_path / "load.json")]) == 1
    assert capsys.readouterr().err.endswith("load: error: only 3 sessions began\n")


async def test_an_idle_session_that_fails_is_told(dead_address: str) -> None:
    async with AsyncClient(dead_address, patience=0.0) as client:
        crowd = SessionCrowd(client, seed=1, limit_s=30.0)
        await crowd.hold(asyncio.Event())
        with pytest.raises(BenchError, match="idle sessions: UNAVAILABLE: "):
            await load._until_still(load.LoadSettings(idle=1), crowd)


def test_ctrl_c_before_there_is_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "soak", interrupted)
    assert run.main(["--out", str(tmp_path / "soak.json")]) == 130
