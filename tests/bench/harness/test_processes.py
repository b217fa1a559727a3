"""Work in several processes: in the order that was asked for, and no more of it than is wanted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import psutil
import pytest

from bench.harness import ROOT
from bench.harness.processes import FEW, in_processes
from tests.wait import eventually

LIMIT_S = 60.0
# Each of two processes notes its number, and is then busy for a moment, again and again.
ASKS = """
import os, pathlib, sys, time
sys.path.insert(0, {root!r})
from bench.harness.processes import in_processes

def busy(number):
    (pathlib.Path(sys.argv[1]) / str(os.getpid())).touch()
    time.sleep(0.1)

if __name__ == "__main__":
    for each in in_processes(busy, range(100_000), 2):
        pass
"""


def double(value: int) -> int:
    time.sleep(0.02 * (value % 3))
    return 2 * value


def where(value: int) -> int:
    return os.getpid()


def noted(value: int, folder: Path) -> int:
    (folder / str(value)).touch()
    return value


def refused(value: int) -> int:
    raise ValueError(f"not {value}")


def test_what_is_found_comes_in_the_order_that_was_asked_for() -> None:
    assert list(in_processes(double, range(12), 2)) == [2 * value for value in range(12)]


def test_others_do_it_unless_it_is_little_or_for_one() -> None:
    assert os.getpid() not in set(in_processes(where, range(FEW + 1), 2))
    assert set(in_processes(where, range(FEW), 2)) == {os.getpid()}
    assert set(in_processes(where, range(12), 1)) == {os.getpid()}
    with pytest.raises(ValueError, match="not 0"):
        list(in_processes(refused, range(FEW + 1), 2))  # what fails there is told here


def test_what_was_not_begun_is_left_where_no_more_is_wanted(tmp_path: Path) -> None:
    asked = range(2000)
    with closing(in_processes(partial(noted, folder=tmp_path), asked, 2)) as found:
        assert next(found) == 0
    done = len(list(tmp_path.iterdir()))
    assert 1 <= done < len(asked)
    time.sleep(0.2)
    assert len(list(tmp_path.iterdir())) == done


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_whoever_asked(number: signal.Signals, tmp_path: Path) -> None:
    program = tmp_path / "asks.py"
    program.write_text(ASKS.format(root=str(ROOT)))
    began = tmp_path / "began"
    began.mkdir()
    with subprocess.Popen([sys.executable, str(program), str(began)], stderr=subprocess.DEVNULL) as asking:
        try:
            assert eventually(lambda: len(list(began.iterdir())) == 2)
            workers = [int(each.name) for each in began.iterdir()]
            asking.send_signal(number)
            assert asking.wait(LIMIT_S) != 0
        finally:
            asking.kill()
    assert eventually(lambda: not any(map(psutil.pid_exists, workers)))
