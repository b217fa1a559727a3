"""The whole measurement on tiny random models: real processes, no word about their speed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench.main import run
from bench.peers import openvino_rows
from deploy.stack.processes import descendants
from tests.bench.tiny import save_head, save_pair


@pytest.mark.timeout(600)
def test_a_quick_measurement_ends_with_a_table_a_file_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openvino_rows, "PACKAGES", ("not_installed_here",))
    target, draft = save_pair(tmp_path)
    head = save_head(tmp_path, target)
    out = tmp_path / "results" / "main.json"
    words = ["--quick", "--no-ray", "--target", str(target), "--draft", str(draft), "--head", str(head)]
    before = set(descendants(os.getpid()))

    code = run.main([*words, "--out", str(out)])

    printed = capsys.readouterr().out
    assert code == 0, printed
    assert set(descendants(os.getpid())) <= before
    for label in (
        "transformers",
        "transformers assisted",
        "specwire, drafting off",
        "specwire, drafting on, with a head",
    ):
        assert label in printed
    found = json.loads(out.read_text())
    assert len(found["raw"]) == 2 * 5
    assert [row["key"] for row in found["rows"]] == ["a", "b", "c", "d", "h"]
    assert all({"name", "value", "low", "high", "needed", "holds"} <= bar.keys() for bar in found["bars"])
    # So few tokens may arrive in one chunk, and then no gap between two forwards can be told apart.
    assert 3 + 3 + 2 <= len(found["bars"]) <= 3 + 3 + 6
    assert len(found["variants"]) == 5
    assert found["notes"] == [openvino_rows.NOT_INSTALLED]
    assert str(tmp_path) not in out.read_text()
    assert out.with_suffix(".png").stat().st_size > 10_000


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_a_box_is_measured_in_one_process_and_in_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openvino_rows, "PACKAGES", ("not_installed_here",))
    target, draft = save_pair(tmp_path)
    out = tmp_path / "box.json"
    words = ["--box", "--quick", "--dtype", "float32", "--target", str(target), "--draft", str(draft)]
    before = set(descendants(os.getpid()))

    code = run.main([*words, "--out", str(out)])

    printed = capsys.readouterr().out
    assert code == 0, printed
    assert set(descendants(os.getpid())) <= before
    found = json.loads(out.read_text())
    assert [row["key"] for row in found["rows"]] == ["a", "f", "g", "o-off", "o-on", "s-off", "s-on"]
    assert all(row["label"] in printed for row in found["rows"])
    assert all(row["to"].keys() == {"a"} for row in found["rows"])
    assert found["variants"] == []
    assert {bar["name"].partition(" ")[0] for bar in found["bars"]} <= {"texts", "ms,"}
    assert found["notes"] == [openvino_rows.NOT_INSTALLED]
    assert out.with_suffix(".png").stat().st_size > 5_000
