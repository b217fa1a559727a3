"""Many sessions at once on tiny random models: real processes, no word about their speed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench.batch import run
from bench.batch.rows import OURS
from deploy.stack.processes import descendants
from tests.bench.tiny import save_head, save_pair


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_a_quick_measurement_ends_with_tables_a_file_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = save_pair(tmp_path)
    head = save_head(tmp_path, target)
    out = tmp_path / "results" / "batch.json"
    words = ["--quick", "--no-ray", "--runtime", "torch", "--dtype", "float32", "--out", str(out)]
    before = set(descendants(os.getpid()))

    code = run.main([*words, "--target", str(target), "--draft", str(draft), "--head", str(head)])

    printed = capsys.readouterr().out
    assert code == 0, printed
    assert set(descendants(os.getpid())) <= before
    found = json.loads(out.read_text())
    sampled = {"off, 0.8", "automatic, 0.8", "automatic, head, 0.8"}
    rows = {"off", "on", "automatic", "automatic, head", "padded", "continuous"} | sampled
    assert {(row["level"], row["row"]) for row in found["rows"]} == {(level, row) for level in (1, 2) for row in rows}
    assert all(row["label"] in printed for row in found["rows"])
    ours = [line for line in found["rows"] if line["row"] in OURS]
    untold = {f"{line['level']} at once, {line['row']}" for line in ours if line["outside"] is None}
    noted = [note.partition(": no step had all sessions in it") for note in found["notes"]]
    # A note or a figure, never both. Which one hangs on the machine: two sessions may begin so far apart that no two
    # steps have both, and few steps decide a drafted text. One session alone without a drafter has figures always.
    assert untold == {where for where, found_it, _ in noted if found_it}
    assert "1 at once, off" not in untold
    assert {load["row"] for load in found["loads"]} == {"off", "automatic"}
    assert {"1 at once, automatic / off, alone", "2 at once, automatic / off"} <= {bar["name"] for bar in found["bars"]}
    assert "specwire's forwards are computed by torch." in found["notes"]
    assert str(tmp_path) not in out.read_text()
    assert out.with_suffix(".png").stat().st_size > 10_000
