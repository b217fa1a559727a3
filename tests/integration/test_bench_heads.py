"""`make bench-heads` on tiny random models and heads: real processes, no word about their speed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench import heads
from deploy.stack.processes import descendants
from tests.bench.tiny import save_head, save_pair


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_a_short_measurement_has_the_rows_that_can_be_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = save_pair(tmp_path)
    head = save_head(tmp_path, target)
    (tmp_path / "heads" / "medusa").mkdir(parents=True)
    (tmp_path / "heads" / "medusa" / "config.json").write_text("{}")
    out, corpus = tmp_path / "results" / "heads.json", tmp_path / "corpus.py"
    corpus.write_text("def add(left, right):\n    return left + right\n" * 20)
    words = ["--prompts", "2", "--tokens", "16", "--sessions", "1,2", "--rounds", "1", "--dtype", "float32"]
    words += ["--runtime", "torch", "--only", "far,ngram,table,eagle3,medusa,mtp,automatic,transformers"]
    words += ["--head", str(head), "--trained", str(tmp_path / "heads"), "--corpus", str(corpus), "--out", str(out)]
    before = set(descendants(os.getpid()))

    code = heads.main([*words, "--target", str(target), "--draft", str(draft)])

    printed = capsys.readouterr().out
    assert code == 0, printed
    assert set(descendants(os.getpid())) <= before
    found = json.loads(out.read_text())
    rows = {(row["level"], row["temperature"], row["row"]): row for row in found["rows"]}
    ours = ("off", "far", "ngram", "table", "eagle3", "automatic")
    places = [(level, temperature) for level in (1, 2) for temperature in (0.0, 0.8)]
    assert rows.keys() == {(*place, row) for place in places for row in ours} | {(1, 0.0, "transformers")}
    assert all(row["runtime"] == "torch" for row in rows.values() if row["row"] in ours)
    # Nobody drafts for off; a session for which a head drafts is told how that went.
    assert {(row["tokens_per_forward"], len(row["sources"])) for row in rows.values() if row["row"] == "off"} == {
        (1.0, 0)
    }
    assert all(set(row["sources"]) <= {"head"} for row in rows.values() if row["row"] == "eagle3")
    # Whether it drafts hangs on how fast this machine is just now.
    assert all(row["head_share"] for row in rows.values() if row["row"] == "eagle3" and row["sources"])
    assert "medusa was not measured: specwire up: ended without an answer; its last words are above." in found["notes"]
    assert "mtp was not measured: there is no head in mtp." in found["notes"]
    names = {bar["name"] for bar in found["bars"]}
    assert "1 at once, automatic / off" in names
    assert any(name.startswith("2 at once, automatic / the best single source") for name in names)
    assert str(tmp_path) not in out.read_text()
