"""`make bench-copy` on tiny random models: real processes, no word about their speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import copy
from tests.bench.tiny import save_pair


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_a_quick_measurement_ends_with_a_table_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = save_pair(tmp_path)
    out = tmp_path / "copy.json"
    words = ["--no-ray", "--prompts", "2", "--tokens", "24", "--repeats", "1", "--dtype", "float32"]

    code = copy.main([*words, "--target", str(target), "--draft", str(draft), "--out", str(out)])

    printed = capsys.readouterr().out
    assert code == 0, printed
    for label in ("plain decoding", "drafter only", "n-gram only", "both", "us per proposal at 8000 tokens"):
        assert label in printed
    found = json.loads(out.read_text())
    rows = {row["key"]: row for row in found["rows"]}
    assert list(rows) == ["plain", "drafter", "ngram", "both"]
    assert rows["plain"]["tokens_per_forward"] == 1.0
    assert rows["plain"]["acceptance"] == {"drafter": None, "ngram": None}
    assert rows["drafter"]["acceptance"]["ngram"] is rows["ngram"]["acceptance"]["drafter"] is None
    assert len(found["raw"]) == 2 * 4
    assert str(tmp_path) not in out.read_text()
