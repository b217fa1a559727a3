"""A short measurement of a target with recurrent layers ends with a table and a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench import hybrid
from deploy.stack.processes import descendants


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_a_short_measurement_has_every_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, before = tmp_path / "hybrid.json", set(descendants(os.getpid()))
    code = hybrid.main(["--layers=3", "--prompts=1", "--tokens=16", "--repeats=1", "--steps=2", f"--out={out}"])
    printed, found = capsys.readouterr().out, json.loads(out.read_text())
    assert code in (0, 1), printed  # how fast it is says nothing here
    assert set(descendants(os.getpid())) <= before
    assert {name: len(each) for name, each in found["ms"].items()} == {"kept": 3, "bare": 3, "own modules": 3}
    assert [line["row"] for line in found["lines"]] == ["a", "off", "default"]
    assert found["slot_bytes"]["states"] > 0
    (texts,) = (bar for bar in found["bars"] if bar["name"].startswith("texts"))
    assert texts["holds"], printed


def test_what_cannot_be_measured_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word, message in (
        ("--layers=2", "layers: must be at least 3, not 2"),
        ("--tokens=0", "tokens: must be at least 1, not 0"),
    ):
        assert hybrid.main([word, f"--out={tmp_path / 'hybrid.json'}"]) == 2
        assert message in capsys.readouterr().err
