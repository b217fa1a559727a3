"""A short measurement of a pair of planted agreement, with tiny shapes, ends with a table and a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench import large
from bench.wan.rig import can_be_apart
from deploy.stack.processes import descendants
from scripts.figures.speed import large_table


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_a_short_measurement_has_every_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, before = tmp_path / "large.json", set(descendants(os.getpid()))
    words = ["--target", "tiny", "--draft", "tiny-draft", "--prompts", "2", "--tokens", "24", "--repeats", "1"]

    code = large.main([*words, "--weights", "float32", "--runtime", "torch", "--out", str(out)])

    printed, found = capsys.readouterr().out, json.loads(out.read_text())
    assert code in (0, 1), printed  # how fast it is says nothing here
    assert set(descendants(os.getpid())) <= before
    told = ("box", "0 ms", "20 ms") if can_be_apart() else ("box",)
    assert [(line["place"], line["row"]) for line in found["lines"]] == [
        (place, row) for place in told for row in ("off", "default")
    ]
    assert len(found["raw"]) == 2 * 2 * len(told)
    (texts,) = (bar for bar in found["bars"] if bar["name"].startswith("texts"))
    assert texts["holds"], printed
    assert "float32, box, default" in printed
    assert "planted acceptance 0.8" in large_table(found)


def test_what_cannot_be_measured_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--weights", "int4"], "weights: must be of float32, int8, int8-dynamic, not 'int4'"),
        (["--acceptance", "1.5"], "acceptance: must be from 0 to 1, not 1.5"),
        (["--tokens", "0"], "tokens: must be at least 1, not 0"),
    ):
        assert large.main([*words, "--out", str(tmp_path / "large.json")]) == 2
        assert message in capsys.readouterr().err
