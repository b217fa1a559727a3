"""The command line of the bench of steps."""

from __future__ import annotations

import json
import platform
from argparse import Namespace
from pathlib import Path

import pytest

from bench.step import run as step
from bench.step.results import StepSample
from bench.step.run import main
from tests.bench.step.test_results import EIGHT, ONE, samples


@pytest.mark.parametrize(("name", "least"), [("prompts", 1), ("tokens", 16), ("repeats", 1), ("threads", 1)])
def test_nothing_to_measure(name: str, least: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--{name}", "0"]) == 2
    assert capsys.readouterr().err == f"bench: error: {name}: must be at least {least}, not 0\n"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="ONEDNN_MAX_CPU_ISA is of x86-64")
def test_the_record_names_what_the_machine_computes_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what was measured in, and without bfloat16 there is no bar to hold."""
    measured = []

    def measure(args: Namespace) -> tuple[list[StepSample], list[str]]:
        measured.append(args.dtype)
        return samples([ONE, EIGHT]), []

    monkeypatch.setattr(step, "measure", measure)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    out = tmp_path / "step.json"
    assert main(["--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert (record["arguments"]["dtype"], measured, record["bars"]) == ("float32", ["float32"], [])
