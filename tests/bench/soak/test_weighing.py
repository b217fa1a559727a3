"""What a process holds is told, and a leak of a kibibyte a session is told from memory that only moves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.harness import ROOT
from bench.soak.memory import MOST_KEPT, Point, kept_bytes
from bench.soak.weighing import ENVIRONMENT, weigh, words

SESSIONS, TIMES = 100, 36
# What a kept object has around it: its head, malloc's, and a place in a list.
AROUND = 64


def weighed(socket: Path, kept: int) -> list[Point]:
    """Of a program that keeps so many bytes of each session, each time that some have come and gone."""
    command = (sys.executable, "-m", *words(socket, "tests.bench.soak.churn"), str(kept))
    surroundings = {**os.environ, **ENVIRONMENT}
    points = []
    with subprocess.Popen(
        command, cwd=ROOT, env=surroundings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for time in range(TIMES):
            print(SESSIONS, file=process.stdin, flush=True)
            assert process.stdout.readline() == "done\n"
            points.append(Point(SESSIONS * time, weigh(socket) / 2**20))
        process.stdin.close()
        assert process.wait(30) == 0
    return points


def test_a_leak_of_a_kibibyte_a_session_misses_the_bar(tmp_path: Path) -> None:
    kept = 1024 - AROUND
    found = kept_bytes(weighed(tmp_path / "socket", kept))
    assert found.low > MOST_KEPT
    assert found.low <= 1024 <= found.high + 2 * AROUND


def test_without_a_leak_it_holds(tmp_path: Path) -> None:
    found = kept_bytes(weighed(tmp_path / "socket", 0))
    assert found.high <= MOST_KEPT


def test_nobody_answers(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        weigh(tmp_path / "socket")
