"""`make bench-real`, `make bench` and its like on tiny random models: real processes, no word about their speed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench.harness.child import descendants
from bench.speed import rows, run
from tests.bench.tiny import save_head, save_pair

OURS = [f"--option={word}" for word in ("--runtime", "torch")]


@pytest.fixture(autouse=True)
def _journals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "JOURNALS", tmp_path / "journals")


def measured(folder: Path, name: str, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The record of a short measurement, which leaves no process and tells no path."""
    target, draft = save_pair(folder)
    head = save_head(folder, target)
    before = set(descendants(os.getpid()))
    models = ("--target", str(target), "--draft", str(draft), "--head", str(head), "--out", str(folder / "out"))
    code = run.main([name, *models, "--prompts", "2", "--tokens", "16", "--minutes", "8", *OURS, *words])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert set(descendants(os.getpid())) <= before
    (path,) = (folder / "out").iterdir()
    assert str(folder) not in path.read_text()
    found: dict[str, Any] = json.loads(path.read_text())
    assert all(row["row"] in printed for row in found["rows"])
    return found


def places(found: dict[str, Any]) -> dict[tuple[str, str, int, float], dict[str, Any]]:
    return {(row["piece"], row["row"], row["level"], row["temperature"]): row for row in found["rows"]}


def why(found: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {(each["piece"], each["row"]): each["why"] for each in found["failed"]}


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_models_that_people_run_have_the_rows_that_can_be_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--pieces", "main,far,many", "--sessions", "2", "--option=--dtype", "--option=float32")
    found = measured(tmp_path, "tiny", capsys, *words)
    have = places(found)
    many = [("many", row, 2) for row in (rows.OFF, rows.DEFAULT)]
    alone = [("main", rows.OFF, 1), ("main", rows.DEFAULT, 1), *(("far", row, 1) for row in (rows.OFF, *rows.FAR))]
    if len(os.sched_getaffinity(0)) < 2:
        alone = [place for place in alone if place[1] not in rows.FAR]
    assert have.keys() == {(*place, drawn) for place in (*alone, *many) for drawn in run.TEMPERATURES}
    assert {row["tokens_per_forward"] for row in have.values() if row["row"] in (rows.OFF, rows.FAR_OFF)} == {1.0}
    assert why(found)["main", rows.LLAMACPP] == "it is measured on GGUF files, and the target is none"
    # A process of ours has imported grpc at least; it was ready after some time.
    ours = [fact for fact in found["facts"] if fact["row"] == rows.DEFAULT]
    assert all(fact["peak"] >= fact["resident"] > 50 and fact["ready_seconds"] > 0.1 for fact in ours)
    assert {fact["runtime"] for fact in ours} == {"torch"}


@pytest.mark.timeout(600)
def test_the_pair_is_measured_beside_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(tmp_path, "main", capsys, "--dtype", "float32", "--pieces", "main")
    have = places(found)
    expected = (rows.OFF, rows.HEADLESS, rows.DEFAULT, rows.TRANSFORMERS, rows.ASSISTED)
    assert have.keys() == {("main", row, 1, drawn) for row in expected for drawn in run.TEMPERATURES}
    assert found["failed"] == []
    for row in (rows.TRANSFORMERS, rows.ASSISTED):
        assert have["main", row, 1, 0.0]["unlike"] == 0
    off = have["main", rows.OFF, 1, 0.0]
    assert off["to"].keys() == {rows.TRANSFORMERS}
    assert off["delivery_ms"].keys() == set(run.WAY)
    assert len(off["pauses_ms"]) == 2
    needed = {bar["name"].partition(": ")[2] for bar in found["bars"]}
    assert {f"{rows.HEADLESS} / {rows.TRANSFORMERS}", f"{rows.OFF}: ms between two forwards"} <= needed


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_a_box_has_one_process_and_the_forward_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(tmp_path, "box", capsys, "--dtype", "float32", "--pieces", "box")
    expected = (rows.OFF, rows.HEADLESS, rows.ONE_OFF, rows.ONE, rows.FORWARD, rows.PAUSED)
    assert {place[1] for place in places(found)} == set(expected)
    assert found["failed"] == []
    assert {row["unlike"] for row in found["rows"] if row["row"] == rows.FORWARD} == {0}


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_several_are_measured_beside_transformers_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(tmp_path, "batch", capsys, "--dtype", "float32", "--sessions", "1,2")
    have = places(found)
    missing = why(found).keys()
    expected = {rows.OFF, rows.HEADLESS, rows.DEFAULT, rows.STATIC, rows.CONTINUOUS}
    assert {row for _, row, level, _ in have if level == 2} == expected - {row for _, row in missing}
    assert {row for _, row in missing} <= {rows.CONTINUOUS}  # it may not run here
    assert have["batch", rows.STATIC, 2, 0.0]["unlike"] == 0
    assert have["batch", rows.OFF, 2, 0.0]["text_to_off"]["value"] == 1.0
    assert f"2 at once, 0.8, 16 tokens: {rows.HEADLESS} / {rows.OFF}" in {bar["name"] for bar in found["bars"]}


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_heads_that_are_not_there_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--dtype", "float32", "--sessions", "1,2", "--pieces", "heads")
    found = measured(tmp_path, "heads", capsys, *words, "--trained", str(tmp_path / "heads"))
    expected = {rows.OFF, rows.DRAFTER, rows.TEXTS, rows.HEAD, rows.DEFAULT}
    assert {(row, level) for _, row, level, _ in places(found)} == {(row, at) for row in expected for at in (1, 2)}
    assert why(found) == {("heads", kind): f"there is no head in {kind}" for kind in ("medusa", "mtp")}
    sources = {row["row"]: set(row["sources"]) for row in found["rows"]}
    assert sources[rows.OFF] == set()
    assert sources[rows.HEAD] <= {"head"}
    assert any("the best" not in bar["name"] and f"{rows.DEFAULT} / " in bar["name"] for bar in found["bars"])
