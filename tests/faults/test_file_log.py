"""A box whose log is a file: its orchestrator is killed, or its disk is full, and the text goes on unchanged."""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.parts import ServiceProcess
from tests.faults.stack import PLAIN, Stack, read_log
from tests.faults.streams import Stream, plain
from tests.wait import eventually

LENGTH = 600
PATIENCE_S = 120.0
# A target step takes 8 ms here.
QUIET_S = 1.0


@contextmanager
def boxed(healthy: Stack, log: Path, *more: str) -> Iterator[ServiceProcess]:
    """An orchestrator of its own with the log in that file, and the stack's verifier and drafter."""
    peers = ("--verifier", healthy.verifier.address, "--drafter", healthy.drafter.address)
    serving = healthy.parts.start("orchestrate", *peers, "--redis-url", f"file:{log}", *more)
    try:
        serving.ready()
        yield serving
    finally:
        serving.kill()


@pytest.mark.parametrize("level", ["file", "file-fsync"])
def test_killed_again_and_again(healthy: Stack, tmp_path: Path, level: str) -> None:
    log = tmp_path / "log"
    with boxed(healthy, log, "--durability", level) as serving:
        with Stream(serving.address, patience=PATIENCE_S, max_tokens=LENGTH) as stream:
            for length in (60, 200, 350):
                stream.until(length)
                serving.restart()
                serving.ready()
            stream.check_whole(plain(PLAIN, LENGTH))
        assert len(stream.breaks) >= 3
    stream.check_logged(read_log(f"file:{log}", stream.session_id))


def test_a_full_disk_pauses_the_text(healthy: Stack, tmp_path: Path) -> None:
    """The process's limit on a file's size stands for the disk."""
    log = tmp_path / "log"
    with boxed(healthy, log) as serving:
        pid, limited = serving.process.pid, resource.RLIMIT_FSIZE
        with Stream(serving.address, max_tokens=LENGTH) as stream:
            stream.until(60)
            soft, hard = resource.prlimit(pid, limited)
            written = log.with_name(f"{log.name}-wal").stat().st_size
            resource.prlimit(pid, limited, (written + 2000, hard))
            stream.until_quiet(QUIET_S)
            assert eventually(lambda: "the session log takes no writes: its file cannot be written" in serving.said())
            resource.prlimit(pid, limited, (soft, hard))
            stream.check_whole(plain(PLAIN, LENGTH))
            assert eventually(lambda: "the session log takes writes again" in serving.said())
    stream.check_logged(read_log(f"file:{log}", stream.session_id))


@contextmanager
def failing_fsync(pid: int) -> Iterator[None]:
    """Meanwhile the system tells the process that its disk took nothing of what was to be on it."""
    fault = "inject=fsync,fdatasync:error=EIO"
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync,fdatasync", "-e", fault, "-p", str(pid)]
    with subprocess.Popen(command) as tracer:
        try:
            yield
        finally:
            tracer.terminate()


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace has system calls fail")
def test_a_disk_that_takes_nothing_pauses_the_text(healthy: Stack, tmp_path: Path) -> None:
    """Nothing counts that could not be forced to it; once it takes something again, that is written anew."""
    log = tmp_path / "log"
    with (
        boxed(healthy, log, "--durability", "file-fsync") as serving,
        Stream(serving.address, max_tokens=LENGTH) as stream,
    ):
        stream.until(60)
        with failing_fsync(serving.process.pid):
            assert eventually(lambda: "takes no writes: its file cannot be written" in serving.said())
            stream.until_quiet(QUIET_S)
        stream.check_whole(plain(PLAIN, LENGTH))
    stream.check_logged(read_log(f"file:{log}", stream.session_id))
