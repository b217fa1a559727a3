"""Figures, bars, table and file of a measurement of steps, from made samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.step import results as step_results
from bench.step.results import PEER, StepCell, StepResults, StepSample
from scripts.figures.speed import step_table

ONE, EIGHT, MANY = StepCell("torch", 1, (1,)), StepCell("torch", 1, (8,)), StepCell("torch", 16, (1,))
MIXED = StepCell("torch", 1, (1, 5))
# Milliseconds of a step: V(8) is 1.5 V(1), V(1) is 2.5 of the peer's tokens.
MS = {ONE: 1.0, EIGHT: 1.5, MANY: 4.0, MIXED: 1.2, PEER: 0.4}
REPEATS = 7


def samples(cells: Sequence[StepCell]) -> list[StepSample]:
    """Two texts of 10 and 30 steps; the machine slows down from repeat to repeat, for all alike."""
    return [
        StepSample(repeat, text, cell, MS[cell] / 1e3 * steps * (1 + repeat / 10), steps)
        for repeat in range(REPEATS)
        for text, steps in enumerate((10, 30))
        for cell in cells
    ]


def found(cells: Sequence[StepCell], dtype: str = "bfloat16") -> StepResults:
    return step_results.find(samples(cells), {"dtype": dtype}, ["a note"])


def test_ratios_are_taken_within_a_repeat_so_that_drift_cancels() -> None:
    rows = {row.cell: row for row in found(list(MS)).rows}
    assert rows[EIGHT].ms.value == pytest.approx(1.5 * 1.3)
    for low_or_high in ("low", "value", "high"):
        assert getattr(rows[EIGHT].to_one, low_or_high) == pytest.approx(1.5)
        assert getattr(rows[MANY].to_one, low_or_high) == pytest.approx(4.0)
        assert getattr(rows[ONE].to_peer, low_or_high) == pytest.approx(2.5)
    assert rows[PEER].to_one.value == 1.0


def test_bars() -> None:
    bars = {bar.name: bar for bar in found(list(MS)).bars}
    assert list(bars) == ["torch, V(1) / OpenVINO GenAI's time per token", "torch, V(8) / V(1)"]
    assert [(bar.sense, bar.needed, bar.holds) for bar in bars.values()] == [("<=", 2.0, False), ("<=", 1.6, True)]


def test_without_the_peer_or_in_another_precision_there_is_no_bar_to_hold() -> None:
    alone = found([ONE, EIGHT], dtype="float32")
    assert alone.bars == []
    assert alone.rows[0].to_peer is None
    assert "torch" in step_results.report(alone)


def test_windows_that_change_are_a_row_without_a_bar() -> None:
    rows = found([ONE, MIXED]).rows
    assert [(row.cell.window, row.to_one.value) for row in rows] == [(1, 1.0), (0, pytest.approx(1.2))]
    assert found([ONE, MIXED]).bars == []
    assert "1, 5" in step_results.report(found([ONE, MIXED]))


def test_the_table_and_the_file_say_all(tmp_path: Path) -> None:
    results = found(list(MS))
    printed = step_results.report(results)
    for words in ("OpenVINO GenAI", "MISSED", "holds", "a note", "2.50 [2.50, 2.50]", "98.4%"):
        assert words in printed
    step_results.write(results, tmp_path / "step.json")
    step_results.draw(results, tmp_path / "step.png")
    written = json.loads((tmp_path / "step.json").read_text())
    assert written["name"] == "step"
    assert written["rows"][1]["windows"] == [8]
    assert written["rows"][1]["to_one"]["value"] == pytest.approx(1.5)
    assert len(written["raw"]) == REPEATS * 2 * len(MS)
    where = {"repeat": 0, "text": 0, "runtime": "torch", "sessions": 1, "windows": [1]}
    assert written["raw"][0] == {**where, "seconds": 0.01, "steps": 10}
    assert (tmp_path / "step.png").stat().st_size > 0


def test_the_page_s_table_says_all_too(tmp_path: Path) -> None:
    step_results.write(
        replace(
            found(list(MS)), arguments={"dtype": "bfloat16", "prompts": 2, "tokens": 40, "repeats": 7, "threads": 1}
        ),
        tmp_path / "step.json",
    )
    table = step_table(json.loads((tmp_path / "step.json").read_text()))
    for words in ("| torch | 1 | 1, 5 |", "2.50 (2.50 to 2.50)", "**no**", "1 threads of", "a note"):
        assert words in table
