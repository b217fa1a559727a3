"""`specwire bench` finds the checkout's measurements."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli import main as cli
from deploy.cli.diagnosis import bench

ROOT = Path(__file__).resolve().parents[2]


def test_it_lists_what_make_measures(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    made = [line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("bench")]
    measured = [name for name in made if name != "bench-failover"]  # it plays faults, and lies with their tests
    assert names == [name.removeprefix("bench").removeprefix("-") or "main" for name in measured]


def test_it_becomes_the_measurement() -> None:
    words = (sys.executable, "-m", "deploy", "bench", "sweep", "--help")
    done = subprocess.run(words, cwd="/", env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240.0)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ")
    assert "--out" in done.stdout


def test_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("specwire bench: error: NAME must be one of real, main, ")


def test_without_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert cli.main(["bench"]) == 1
    assert "there is no bench/ here" in capsys.readouterr().err
