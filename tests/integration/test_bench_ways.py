"""The bench of deterministic texts runs, on little, and writes what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import deterministic
from demo_pair import DRAFT
from scripts.figures.exact import MIXED, deterministic_table


@pytest.mark.bench
def test_deterministic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deterministic.json"
    little = ["--sessions", "3", "--tokens", "5", "--mixes", "1", "--repeats", "1", "--dtypes", "float32"]
    assert deterministic.main(["--target", str(DRAFT), *little, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [bar["holds"] for bar in found["bars"]] == [True]
    assert {row["way"]: row["compared"] for row in found["texts"]} == {"as usual": 15, "deterministic": 15}
    assert len(found["times"]) == len(deterministic.SHAPES)
    assert "| float32 | deterministic | 0 | 15 | 0.0e+00 | " in deterministic_table(found)
    assert "takeovers" in deterministic_table(found)
    older = [{name: row[name] for name in row if name not in MIXED} for row in found["texts"]]
    assert "| float32 | deterministic | 0 | 15 | 0.0e+00 |\n" in deterministic_table({**found, "texts": older})
    assert "deterministic" in capsys.readouterr().out


def test_nothing_to_measure_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert deterministic.main(["--tokens", "0"]) == 2
    assert "tokens: must be at least 1, not 0" in capsys.readouterr().err
