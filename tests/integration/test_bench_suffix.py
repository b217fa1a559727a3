"""`make bench-suffix` on a tiny random model: real processes, no word about their speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.suffix import run as suffix
from bench.suffix.sources import KINDS
from scripts.figures.text import suffix_table
from tests.bench.tiny import save_pair


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_a_quick_measurement_ends_with_a_table_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, _ = save_pair(tmp_path)
    out, corpus = tmp_path / "suffix.json", tmp_path / "corpus.py"
    corpus.write_text("def add(left, right):\n    return left + right\n" * 20)
    words = ["--no-ray", "--prompts", "1", "--tokens", "16", "--repeats", "1", "--tenants", "1", "--others", "20000"]

    words += ["--dtype", "float32", "--target", str(target), "--corpus", str(corpus), "--out", str(out)]
    code = suffix.main(words)

    printed = capsys.readouterr().out
    assert code == 0, printed
    for label in (
        "nothing proposed",
        "the session's own text",
        "the tenant's texts",
        "a table of n-grams alone",
        "us per proposal at 8000 tokens",
        "told again",
    ):
        assert label in printed
    found = json.loads(out.read_text())
    rows = {(row["key"], row["steps"]): row for row in found["rows"]}
    assert len(rows) == 2 * (3 * 3 + 1)
    for (key, _), row in rows.items():
        assert row["acceptance"] is None or not key.startswith("off")
        assert row["tokens_per_forward"] >= 1.0
    assert any(row["acceptance"] for row in rows.values())
    assert len(found["raw"]) == 2 * (3 * len(suffix.STEPS) + 1)
    assert len(found["bars"]) == 7
    assert found["look_up"]["bytes_a_token"] > 0
    labels = list(dict.fromkeys(each["label"] for each in found["replayed"]))
    assert labels[:3] == ["the session's own text", "the tenant's texts", "the better of both in hindsight"]
    assert labels[3].startswith("a table of ")
    parts = {(each["temperature"], each["steps"]) for each in found["replayed"]}
    assert len(found["replayed"]) == len(labels) * len(parts) == len(labels) * 2 * len(KINDS)
    assert all(each["tokens_a_guess"] >= 1.0 for each in found["replayed"])
    assert "told again" in suffix_table(found)
    assert str(tmp_path) not in out.read_text()
