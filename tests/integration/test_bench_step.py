"""`make bench-step` on a tiny random model: a real process for each runtime, no word about their speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.peers import openvino_rows
from bench.step import run as step
from tests.bench.tiny import save_pair


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_a_quick_measurement_ends_with_a_table_and_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the peer, whose tests are collected where it is installed."""
    monkeypatch.setattr(openvino_rows, "PACKAGES", ("not_installed_here",))
    target, _ = save_pair(tmp_path)
    out = tmp_path / "step.json"
    words = ["--prompts", "1", "--tokens", "16", "--repeats", "1", "--dtype", "float32", "--threads", "1"]

    code = step.main([*words, "--target", str(target), "--out", str(out)])

    printed = capsys.readouterr().out
    assert code == 0, printed
    found = json.loads(out.read_text())
    assert [row["runtime"] for row in found["rows"]] == ["torch"] * len(step.SHAPES) + ["openvino"] * len(step.SHAPES)
    assert all(row["ms"]["value"] > 0 for row in found["rows"])
    assert found["notes"] == [openvino_rows.NOT_INSTALLED]
    assert str(tmp_path) not in out.read_text()
    assert out.with_suffix(".png").stat().st_size > 0


def test_a_target_that_cannot_be_loaded_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert step.main(["--target", str(tmp_path), "--out", str(tmp_path / "step.json")]) == 1
    assert "bench: error: torch: ModelError" in capsys.readouterr().err
