"""bench.harness.machine: what is measured is named by its commit."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

from bench.harness import machine
from specwire.core.model import AUTO
from specwire.rpc.server_options import DTYPES


def git(folder: Path, *words: str) -> str:
    named = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(
        ["git", *named, *words], cwd=folder, check=True, capture_output=True, text=True, timeout=30
    ).stdout.strip()


def test_a_commit_is_marked_where_what_runs_differs_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, record = tmp_path / "code.py", tmp_path / "bench" / "results" / "main.json"
    record.parent.mkdir(parents=True)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    git(tmp_path, "init", "-q")
    for file in (code, record):
        file.write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "Begin")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert machine.commit() == head
    record.write_text("2")
    assert machine.commit() == head
    code.write_text("2")
    assert machine.commit() == f"{head}+"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="ONEDNN_MAX_CPU_ISA is of x86-64")
def test_what_was_asked_for_is_measured_else_what_the_machine_computes_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Held to AVX2, no processor has instructions for bfloat16."""
    assert [machine.dtype_of(dtype) for dtype in DTYPES] == [*DTYPES]
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert machine.dtype_of(AUTO) == "float32"
    told = "bench: in float32, which this machine computes itself (--dtype says otherwise)\n"
    assert capsys.readouterr().err == told


def test_outside_a_repository_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert machine.commit() is None
