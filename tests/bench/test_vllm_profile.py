"""What is read of a process while its threads end; how turns become an account; which rows are beside each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from bench.harness import ROOT
from bench.harness.child import cpu_seconds
from bench.harness.runs import BenchError
from bench.vllm import run, server
from bench.vllm.profile import OURS, THEIRS, Profiled, Spent, account, wire_seconds
from bench.vllm.run import BOTH, IDLE, LIBRARY, MODEL, NGRAM, OFF, ROWS, groups_of
from bench.vllm.server import Front, StoppableProcesses, awake
from bench.vllm.service import ENGINE, ENGINE_OFF
from deploy.stack.processes import descendants
from tests.wait import eventually


def test_a_thread_that_has_ended_meanwhile_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread is told by its number: it counts whatever it is called."""
    before = cpu_seconds(os.getpid(), os.getpid())
    read = Path.read_text

    def ended(path: Path, encoding: str | None = None, errors: str | None = None) -> str:
        if path.name == "comm":
            raise ProcessLookupError(str(path))
        return read(path, encoding, errors)

    monkeypatch.setattr(Path, "read_text", ended)
    assert before <= wire_seconds(os.getpid()) <= before + 5.0


def test_turns_are_summed_and_compared_one_by_one() -> None:
    row = Profiled(Front("", ""), "steps", dict, dict, {"class": OURS}, THEIRS)
    turns = [
        Spent(4, 1.0, {"steps": 2.0, "class": 0.1}, {"engine": 0.5}),
        Spent(8, 2.0, {"steps": 4.0, "class": 0.2}, {"engine": 1.0}),
    ]
    off = [Spent(4, 0.5, {}, {}), Spent(8, 1.5, {}, {})]
    told = account("a row", row, 2, turns, off)
    assert (told.tokens, told.step_ms) == (2.0, 500.0)
    assert told.parts_ms == {OURS: pytest.approx(50.0), THEIRS: pytest.approx(450.0)}
    assert told.cpu_ms == {"engine": 250.0}
    assert (told.to_off.low, told.to_off.high) == (0.5, 0.75)
    idle = [Spent(4, 1.0, {"steps": 0.0, "class": 0.0}, {})]
    with pytest.raises(BenchError, match="a row: no step was counted"):
        account("a row", row, 2, idle, off[:1])


def test_fewer_prompts_than_sessions_are_refused_before_anything_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    args = run.parser().parse_args(["--prompts", "8", "--sessions", "1", "16", "--out", "elsewhere"])
    assert run.unfit(args, run.OUT, run.ROWS)
    assert "prompts: must be at least 16, one for each session, not 8" in capsys.readouterr().err
    assert not run.unfit(run.parser().parse_args(["--prompts", "8", "--sessions", "4"]), run.OUT, run.ROWS)


def test_rows_that_are_asked_for_have_what_they_are_compared_with() -> None:
    def rows(*only: str) -> list[tuple[str, ...]]:
        return [(*group.rows, *group.engine) for group in groups_of(only)]

    assert rows(IDLE, LIBRARY) == [(OFF, LIBRARY, IDLE)]
    assert rows(NGRAM, MODEL) == [(OFF, NGRAM, MODEL)]
    assert rows(BOTH, NGRAM) == [(OFF, NGRAM), (OFF, NGRAM, BOTH)]
    assert rows(ENGINE[20]) == [(OFF, ENGINE_OFF, ENGINE[20])]
    assert rows(ENGINE_OFF) == [(OFF, ENGINE_OFF)]
    assert {row for each in rows(*ROWS) for row in each} == {OFF, *ROWS}
    assert len(rows(*ROWS)) == 4


class TwoProcesses(StoppableProcesses):
    """A shell and what it waits for."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(["/bin/sh", "-c", "sleep 600 & wait"], start_new_session=True)

    @property
    def pid(self) -> int:
        return self.process.pid

    def _end(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()

    def states(self) -> list[str]:
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in (self.pid, *descendants(self.pid))]
        return [stat.rpartition(")")[2].split()[0] for stat in stats]


@pytest.fixture
def two() -> Iterator[TwoProcesses]:
    started = TwoProcesses()
    yield started
    started.end()


def test_the_processes_of_a_server_run_in_its_turns_only(two: TwoProcesses) -> None:
    """A turn that fails ends, too; who is no server of vLLM's is let run."""
    assert eventually(lambda: two.states() == ["S", "S"])
    two.stop()
    assert eventually(lambda: two.states() == ["T", "T"])
    with pytest.raises(BenchError), awake(two):
        assert eventually(lambda: two.states() == ["S", "S"])
        raise BenchError
    assert eventually(lambda: two.states() == ["T", "T"])
    with awake(Front("", "")):
        assert two.states() == ["T", "T"]


KILLED_BENCH = """
import os, pathlib, signal, sys
from tests.bench.test_vllm_profile import TwoProcesses
two = TwoProcesses()
while two.states() != ["S", "S"]: pass
two.stop()
pathlib.Path(sys.argv[1]).write_text(str(two.pid))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_stopped_processes_do_not_outlive_a_bench_that_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "group"
    done = subprocess.run([sys.executable, "-c", KILLED_BENCH, str(told)], cwd=ROOT, timeout=240, check=False)
    assert done.returncode == -signal.SIGKILL
    group = int(told.read_text())
    try:
        assert eventually(lambda: not living(group))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def living(group: int) -> list[int]:
    """The processes of a group that are not about to be gone."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            found += [int(stat.parent.name)] if int(its_group) == group and state not in "ZX" else []
    return found


def test_a_server_that_dials_a_drafter_runs_on_until_it_spins_no_more(
    two: TwoProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafter would hang up on one that is stopped."""
    waited: list[float] = []
    assert eventually(lambda: two.states() == ["S", "S"])
    monkeypatch.setattr(time, "sleep", waited.append)
    two.dials = True
    with awake(two):
        assert not waited
    assert waited == [server.SETTLE_S, server.SPINS_S]
    assert two.states() == ["S", "S"]


class EndedServer:
    """Stands for a VllmServer; notes that it was ended."""

    def __init__(self, ended: list[str]) -> None:
        self._ended = ended

    def end(self) -> None:
        self._ended.append("the first")


def test_a_server_that_has_started_is_ended_though_the_next_one_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended: list[str] = []
    started: list[EndedServer] = []

    def start(*_: object, **__: object) -> EndedServer:
        if started:
            raise OSError("no more processes")
        started.append(EndedServer(ended))
        return started[0]

    monkeypatch.setattr(run, "VllmServer", start)
    with pytest.raises(OSError, match="no more processes"), ExitStack() as present:
        run.servers(present, tmp_path, run.VllmGroup((OFF, NGRAM)), "127.0.0.1:1", {})
    assert ended == ["the first"]
