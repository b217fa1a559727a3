"""`make bench-real` on tiny random models: real processes, no word about their speed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench.real import rows, run
from deploy.stack.processes import descendants
from tests.bench.tiny import save_head, save_pair


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_a_short_measurement_has_the_rows_that_can_be_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "JOURNALS", tmp_path / "journals")
    target, draft = save_pair(tmp_path)
    head = save_head(tmp_path, target)
    words = ["tiny", "--target", str(target), "--draft", str(draft), "--head", str(head), "--pieces", "main,far,many"]
    words += ["--prompts", "2", "--tokens", "16", "--sessions", "2", "--minutes", "8", "--out", str(tmp_path / "out")]
    words += [f"--option={word}" for word in ("--runtime", "torch", "--dtype", "float32")]
    before = set(descendants(os.getpid()))

    code = run.main(words)

    printed = capsys.readouterr().out
    assert code == 0, printed
    assert set(descendants(os.getpid())) <= before
    found = json.loads((tmp_path / "out" / "real_tiny.json").read_text())
    have = {(row["piece"], row["row"], row["level"], row["temperature"]): row for row in found["rows"]}
    many = [("many", row, 2) for row in (rows.OFF, rows.DEFAULT)]
    alone = [("main", rows.OFF, 1), ("main", rows.DEFAULT, 1), *(("far", row, 1) for row in (rows.OFF, *rows.FAR))]
    if len(os.sched_getaffinity(0)) < 2:
        alone = [place for place in alone if place[1] not in rows.FAR]
    assert have.keys() == {(*place, drawn) for place in (*alone, *many) for drawn in run.TEMPERATURES}
    assert {row["tokens_per_forward"] for row in have.values() if row["row"] in (rows.OFF, rows.FAR_OFF)} == {1.0}
    failed = {(each["piece"], each["row"]): each["why"] for each in found["failed"]}
    assert failed["main", rows.LLAMACPP] == "it is measured on GGUF files, and the target is none"
    # A process of ours has imported grpc at least; it was ready after some time.
    ours = [fact for fact in found["facts"] if fact["row"] == rows.DEFAULT]
    assert all(fact["peak"] >= fact["resident"] > 50 and fact["ready_seconds"] > 0.1 for fact in ours)
    assert {fact["runtime"] for fact in ours} == {"torch"}
    assert str(tmp_path) not in (tmp_path / "out" / "real_tiny.json").read_text()
    assert (tmp_path / "out" / "real_tiny.png").stat().st_size > 10_000
