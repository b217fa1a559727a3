"""`make bench-rag` on tiny random models: real processes, no word about their speed or what they know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import rag
from scripts.figures.text import rag_table
from tests.bench.tiny import save_pair


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_a_quick_measurement_ends_with_a_table_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = save_pair(tmp_path)
    out = tmp_path / "rag.json"
    size = ["--questions", "2", "--top", "4", "--subsets", "2", "--tokens", "4", "--repeats", "1"]
    models = ["--target", str(target), "--draft", str(draft), "--dtype", "float32"]

    code = rag.main(["--no-ray", *size, *models, "--out", str(out)])

    printed, errors = capsys.readouterr()
    assert code == 0, errors
    assert all(label in printed for label in rag.LABELS.values())
    found = json.loads(out.read_text())
    assert [row["key"] for row in found["rows"]] == list(rag.LABELS)
    assert all(row["questions"] == 2 and row["seconds"]["value"] > 0 for row in found["rows"])
    assert len(found["raw"]) == 2 * len(rag.LABELS)
    assert 2 >= found["chances"]["retrieved"] >= found["chances"]["offered"]
    assert "of 2" in rag_table(found)
    assert str(tmp_path) not in out.read_text()
