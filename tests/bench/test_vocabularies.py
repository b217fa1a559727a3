"""The bench of a drafter in other vocabularies: its arguments, its table and its record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness.runs import BenchError, Run, Sample
from bench.vocabularies import BY_TEXT, BY_TOKEN, EQUAL, NONE, FoundVocabulary, VocabularySettings, measure, tell
from scripts.figures.speed import vocabularies_table

SECONDS = {NONE: 4.0, EQUAL: 2.0, BY_TOKEN: 2.0, BY_TEXT: 3.0}


def run_of(row: str) -> Run:
    tested, accepted = (None, None) if row == NONE else (10, 5 if row != BY_TEXT else 2)
    return Run(tuple(range(20)), SECONDS[row], 0.1, 20 if row == NONE else 10, tested, accepted)


@pytest.mark.parametrize("name", ["prompts", "tokens", "repeats"])
def test_an_argument_below_one_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"--{name}: must be at least 1, not 0"):
        replace(VocabularySettings(1, 1, 1, "float32"), **{name: 0})  # type: ignore[arg-type]  # names of three integers


def test_more_prompts_than_there_are_are_refused() -> None:
    with pytest.raises(BenchError, match="--prompts: there are [0-9]+ held-out ones, not 10000"):
        measure(VocabularySettings(10_000, 1, 1, "float32"))


def test_each_drafter_is_set_against_the_one_with_the_target_s_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [Sample(repeat, 0, row, run_of(row)) for repeat in range(7) for row in SECONDS]
    found = FoundVocabulary(VocabularySettings(1, 20, 7, "float32"), {0.0: samples})
    assert {line.row: line.to_equal.value for line in found.lines} == pytest.approx(
        {NONE: 0.5, EQUAL: 1.0, BY_TOKEN: 1.0, BY_TEXT: 2 / 3}
    )
    assert {line.row: line.acceptance for line in found.lines} == {NONE: None, EQUAL: 0.5, BY_TOKEN: 0.5, BY_TEXT: 0.2}
    assert tell(found, tmp_path / "vocabularies.json")
    assert "WordPiece, by text" in capsys.readouterr().out
    record = json.loads((tmp_path / "vocabularies.json").read_text())
    assert [line["tokens_per_forward"] for line in record["lines"]] == [1.0, 2.0, 2.0, 2.0]
    assert len(record["raw"]) == len(samples)
    assert "0.67 (0.67 to 0.67)" in vocabularies_table(record)
