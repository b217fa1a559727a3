"""What is made of many seeds: exit codes, what is kept on disk, and the table that is printed of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.figures.exact import simulation_table
from tests.simulation import __main__ as command
from tests.simulation import record
from tests.simulation.record import WHOLE, Totals
from tests.simulation.run import Outcome, run
from tests.simulation.scenario import random_scenario


def test_a_few_seeds_are_shown_and_kept_where_that_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "OUT", tmp_path / "simulation.json")
    assert command.main(["--seeds", "3", "--first", "3", "--processes", "2", "--out", str(tmp_path / "few.json")]) == 0
    assert "simulation: 3 seeds in " in capsys.readouterr().out  # behind how far it is, where that takes long
    told = json.loads((tmp_path / "few.json").read_text())
    assert (told["seeds"], told["failed"], [bar["holds"] for bar in told["bars"]]) == (3, [], [False, True])
    assert command.main(["--seeds", "1"]) == 0
    assert not (tmp_path / "simulation.json").exists()
    assert "not a whole run: simulation.json is left as it is" in capsys.readouterr().err


def test_what_fails_is_told_by_its_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run(random_scenario(0))

    def fails(seed: int) -> Outcome:
        return replace(outcome, scenario=random_scenario(seed), found=["something did not hold"])

    monkeypatch.setattr(command, "run_seed", fails)
    monkeypatch.setattr(command, "shrunk", lambda scenario: scenario)
    assert command.main(["--seeds", "9", "--processes", "1", "--out", str(tmp_path / "few.json")]) == 1
    told = json.loads((tmp_path / "few.json").read_text())
    assert (told["seeds"], told["failed"]) == (command.MOST_FAILURES, [0, 1, 2, 3, 4])
    said = capsys.readouterr().out
    assert "seed 4:\nsomething did not hold" in said
    assert "5 failed (0, 1, 2, 3, 4)" in said


def test_a_whole_run_is_what_the_table_shows(tmp_path: Path) -> None:
    totals = Totals(range(WHOLE))
    assert totals.whole
    assert not Totals(range(1, WHOLE + 1)).whole
    totals.add(run(random_scenario(0)))
    assert not totals.clean  # the others are missing
    totals.write(tmp_path / record.OUT.name)
    shown = simulation_table(json.loads((tmp_path / record.OUT.name).read_text()))
    assert f"```text\n{totals.shown()}\n```" in shown
