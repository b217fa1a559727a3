"""Rows (e) as the bench asks for them, and what it says where they cannot be measured."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.harness.child import BenchChild
from bench.harness.runs import BenchError
from bench.main import measure
from bench.main.settings import Settings
from bench.peers import openvino_rows
from bench.peers.openvino_rows import draft_rows, lookup_rows, plain_row
from deploy.stack.processes import descendants

# Answers with tokens that tell what was asked.
ANSWERER = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    tokens = [len(asked["prompt"]), asked["settings"].get("num_assistant_tokens", 0)]
    print(json.dumps({"tokens": tokens, "seconds": 0.5, "first_token_seconds": 0.25, "forwards": 2}), flush=True)
"""


def field(target: Path) -> tuple[measure.MainField, Settings]:
    peer = BenchChild("transformers", [sys.executable, "-c", "pass"])
    peer.stop()
    return measure.MainField(peer, [], [], {}, []), Settings(str(target), str(target))


def test_each_mode_asks_with_its_settings() -> None:
    with BenchChild("OpenVINO GenAI", [sys.executable, "-c", ANSWERER]) as peer:
        rows = [plain_row(peer), *draft_rows(peer), *lookup_rows(peer)]
        runs = [row.run([7, 7, 7], 2) for row in rows]
        assert [one.tokens for one in runs] == [(3, k) for k in (0, 3, 5, 8, 0, 3, 5, 8)]
        assert (runs[0].seconds, runs[0].first_token_seconds, runs[0].forwards) == (0.5, 0.25, 2)
        with pytest.raises(BenchError, match="gave 2 tokens, not 5"):
            rows[0].run([7], 5)
    assert sorted({row.key for row in rows}) == ["e", "e-draft", "e-lookup"]
    assert len({row.label for row in rows}) == len(rows)


def test_without_the_extra_a_note_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino_rows, "PACKAGES", ("a_package_that_nobody_has",))
    found, settings = field(tmp_path)
    with ExitStack() as cleanup:
        measure._add_openvino(found, settings, cleanup)
    (note,) = found.notes
    assert note.startswith("(e) OpenVINO GenAI was not measured: the extra `openvino-genai` is not installed")
    assert (found.rows, found.choices) == ([], [])


def test_a_model_that_it_cannot_take_costs_only_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino_rows, "PACKAGES", ())
    found, settings = field(tmp_path)  # an empty folder is no model, and without the extra it does not even start
    before = descendants(os.getpid())
    with ExitStack() as cleanup:
        measure._add_openvino(found, settings, cleanup)
    (note,) = found.notes
    assert note.startswith("(e) OpenVINO GenAI was not measured: OpenVINO GenAI: ")
    assert (found.rows, found.choices) == ([], [])
    assert descendants(os.getpid()) == before
