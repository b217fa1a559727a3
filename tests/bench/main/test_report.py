"""Tables, file and picture from made-up samples."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness.report import table
from bench.harness.runs import Run, Sample
from bench.harness.texts import Judged, Mismatch, TextScores
from bench.main import results
from bench.main.gaps import figures
from bench.main.judged import bars
from bench.main.plot import draw
from bench.main.report import report
from bench.main.results import Results, VariantResult, row_result
from tests.bench.harness.made_rows import FakeRow, arrival, run

SPEEDS = {"a": 1.0, "b": 0.9, "c": 0.8, "d": 0.5}
LABELS = {
    "a": "transformers",
    "b": "transformers assisted, constant k = 3",
    "c": "specwire, drafting off",
    "d": "specwire, drafting on",
}


def made_run(row: str, draw: random.Random) -> Run:
    arrivals = [arrival(number, gap_us=draw.randint(300, 900)) for number in range(3)] if row in "cd" else []
    return run(SPEEDS[row] * draw.uniform(0.8, 1.25), arrivals=arrivals)


@pytest.fixture
def found() -> Results:
    chance = random.Random(5)
    samples = [
        Sample(repeat, prompt, row, made_run(row, chance))
        for repeat in range(7)
        for prompt in range(8)
        for row in "abcd"
    ]
    judged = [Judged(Mismatch("d", 3, 1, 2, 9), 3e-6, TextScores((2, 9), (4.0, 4.0), (4.0, 4.0)), near_tie=True)]
    return Results(
        arguments={"prompts": 8},
        machine={"cores": 2},
        commit=None,
        rows=[row_result(FakeRow(row, LABELS[row]), samples, "ab") for row in "abcd"],
        variants=[VariantResult("default", 90.0, 2.5, chosen=True)],
        bars=bars(samples, figures(samples), judged),
        figures=figures(samples),
        judged=judged,
        cores={row: {"client": 0.1, "transformers": 1.9} for row in "abcd"},
        samples=samples,
        notes=["a note"],
    )


def test_a_table_is_aligned() -> None:
    assert table(("row", "x"), [("long name", "1"), ("b", "22")]) == ["row         x", "long name   1", "b          22"]


def test_the_report_says_what_was_found(found: Results) -> None:
    printed = report(found)
    assert "(d) specwire, drafting on" in printed
    assert "98.4%" in printed
    assert "(d) prompt 3, token 1: 9 instead of 2; the target's top two there are 3.00e-06 apart, a near-tie" in printed
    assert printed.endswith("a note")
    assert found.texts_hold


def test_equal_texts_are_said_to_be_equal(found: Results) -> None:
    assert "texts: all rows equal (a), token for token" in report(replace(found, judged=[]))


def test_the_file_holds_bars_and_raw_runs(found: Results, tmp_path: Path) -> None:
    results.write(found, tmp_path / "main.json")
    read = json.loads((tmp_path / "main.json").read_text())
    assert read["name"] == "main"
    assert len(read["raw"]) == 7 * 8 * 4
    assert {bar["name"]: bar["holds"] for bar in read["bars"]} == {bar.name: bar.holds for bar in found.bars}
    assert read["tokens"] == {str(prompt): [1, 2, 3] for prompt in range(8)}
    assert read["mismatches"][0]["near_tie"] is True


def test_the_picture_is_drawn(found: Results, tmp_path: Path) -> None:
    draw(found, tmp_path / "main.png")
    assert (tmp_path / "main.png").read_bytes().startswith(b"\x89PNG")
