"""`make bench-demo` on tiny random models: real processes, no word about their speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import demo
from tests.bench.tiny import save_pair


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_two_runs_of_the_demo_leave_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = save_pair(tmp_path)
    out = tmp_path / "demo.json"
    words = ["--repeats", "2", "--count", "1", "--max-tokens", "12", "--out", str(out)]
    options = ["--no-ray", "--dtype", "float32", "--target", str(target), "--draft", str(draft)]

    code = demo.main([*words, "--", *options])

    assert code == 0, capsys.readouterr().out
    found = json.loads(out.read_text())
    assert (found["name"], found["dtype"], found["arguments"]["repeats"]) == ("demo", "float32", 2)
    assert found["machine"]["cpu"]
    assert [row["temperature"] for row in found["rows"]] == [0.0, 0.8]
    assert all(row["identical"] + row["near_ties"] == row["texts"] == 2 for row in found["rows"])
    assert len(found["raw"]) == 2
