"""What is written of trees before anything is measured, and the table by which a placement is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.wan.branching import WIDTHS, Placement, gain, main, placement_lines, placements, report, write, written_gains
from bench.wan.cells import RTTS_MS, SHOWN, Cell, grid
from bench.wan.disciplines import DEFAULT, TEXTBOOK
from tests.bench.wan.made import SPEEDS, expected


def test_trees_gain_in_the_cell_that_is_shown_and_that_is_written(tmp_path: Path) -> None:
    """Its first guesses are wrong in a fifth of the places; most of these have the target's token among the others."""
    found = gain(SHOWN, tokens=192, traces=0)
    assert found.gain > 1.1
    assert set(found.by_width) == set(WIDTHS)
    assert found.extended > 2
    write([found], [], 0, tmp_path / "branching.json")
    assert written_gains(tmp_path / "branching.json") == {SHOWN.name: pytest.approx(found.gain)}
    assert SHOWN.name in report([found], [])


def test_nothing_is_known_of_what_was_not_written(tmp_path: Path) -> None:
    assert written_gains(tmp_path / "branching.json") == {}


def test_a_crossing_lies_between_two_round_trips() -> None:
    one = Placement(8.0, 0.8, 54.0, {0.0: 80.0, 20.0: 70.0, 80.0: 40.0})
    assert one.crossing(55.0) == pytest.approx(50.0)
    assert one.crossing(90.0) == 0.0
    assert one.crossing(30.0) is None
    assert "59 ms" in "\n".join(
        placement_lines([Placement(8.0, 0.8, 54.0, dict.fromkeys(RTTS_MS, 60.0) | {80.0: 40.0})])
    )


def test_placements_are_those_of_a_grid_whose_forwards_are_flat() -> None:
    found = placements([expected(cell) for cell in grid()])
    assert len(found) == 12
    assert all(one.textbook == SPEEDS[TEXTBOOK] and set(one.by_rtt.values()) == {SPEEDS[DEFAULT]} for one in found)
    assert placements([expected(Cell(0.0, 8.0, 0.8, 0.0))]) == []


def test_the_command_refuses_what_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--cells", "R1", "--out", str(tmp_path / "branching.json")]) == 2
    assert "no cell" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
