"""`make bench-learn` on a tiny random pair: real processes, no word about their speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import learn
from scripts.figures.text import learn_table
from tests.bench.tiny import save_pair


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_a_quick_measurement_ends_with_a_table_a_picture_and_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = save_pair(tmp_path)
    for name, line in (("first", "def value_{0}(): return {0}\n"), ("then", "int other{0}() {{ return {0}; }}\n")):
        (tmp_path / name).mkdir()
        for number in range(4):
            text = "".join(line.format(number * 100 + each) for each in range(40))
            (tmp_path / name / f"{number}.py").write_text(text)
    out = tmp_path / "learn.json"
    words = ["--target", str(target), "--draft", str(draft), "--first", str(tmp_path / "first")]
    words += ["--then", str(tmp_path / "then"), "--requests", "8", "--tokens", "16", "--dtype", "float32"]

    code = learn.main([*words, "--every", "0.5", "--rate", "0.01", "--out", str(out)])

    printed = capsys.readouterr().out
    assert code == 0, printed
    for label in ("accepted, static", "acceptance behind the change, learning / static", "The learner took "):
        assert label in printed
    found = json.loads(out.read_text())
    assert [part["kind"] for part in found["parts"]] == [0] * learn.PARTS + [1] * learn.PARTS
    assert len(found["raw"]) == 2 * 2 * 8
    assert found["learner"]["cpu_s"] > 0
    assert len(found["bars"]) == 2
    assert "The learner took" in learn_table(found)
    assert out.with_suffix(".png").stat().st_size > 1000
    assert str(tmp_path) not in out.read_text()
