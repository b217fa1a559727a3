"""The benches of dtypes and of deterministic texts run, on little, and write what they print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import deterministic, dtypes
from demo_pair import DRAFT
from scripts.figures.exact import MIXED, deterministic_table, dtypes_table


@pytest.mark.bench
def test_dtypes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "dtypes.json"
    models = ["--target", str(DRAFT), "--draft", str(DRAFT), "--runtimes", "torch"]
    assert dtypes.main([*models, "--prompts", "1", "--tokens", "6", "--ahead", "2", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert "| torch, bfloat16, int8 |" in dtypes_table(found)
    rows = {(row["dtype"], row["quantization"]): row for row in found["rows"]}
    ways = {(dtype, rounded) for dtype in ("float32", "bfloat16") for rounded in ("none", "int8")}
    assert rows.keys() == ways | {("float32", "int8-dynamic")}
    assert rows["float32", "none"]["acceptance"] == 1.0  # a drafter that is the target
    whole, *rounded = (rows["float32", each]["target_loss"] for each in ("none", "int8", "int8-dynamic"))
    assert len({whole, *rounded}) == 3
    assert rounded == pytest.approx([whole, whole], abs=0.1)
    assert "torch bfloat16 int8" in capsys.readouterr().out
    assert str(tmp_path) not in out.read_text()


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


@pytest.mark.parametrize("main", [dtypes.main, deterministic.main])
def test_nothing_to_measure_is_refused(main: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(main)
    assert main(["--tokens", "0"]) == 2
    assert "tokens: must be at least 1, not 0" in capsys.readouterr().err
