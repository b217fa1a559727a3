"""What is written of trees before anything is measured, and the table by which a placement is chosen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.branching.run import (
    WIDTHS,
    BranchingPlacement,
    gain,
    main,
    placement_lines,
    placements,
    reach,
    report,
    write,
    written_gains,
)
from bench.wan.cells import RTTS_MS, SHOWN, WanCell, grid
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


@pytest.mark.parametrize(
    ("speeds", "ranges", "said"),
    [
        ((80.0, 70.0, 40.0), [(0.0, 50.0)], "0 to 50 ms"),
        ((50.0, 60.0, 40.0), [(10.0, 35.0)], "10 to 35 ms"),
        ((50.0, 54.0, 90.0), [(pytest.approx(21.67, abs=0.01), 80.0)], "22 to 80 ms"),
        ((55.0, 55.0, 55.0), [(0.0, 80.0)], "0 to 80 ms"),
        ((75.0, 35.0, 115.0), [(0.0, 10.0), (35.0, 80.0)], "0 to 10 ms, 35 to 80 ms"),
        ((54.9, 54.0, 53.0), [], "nowhere"),
    ],
    ids=["near", "neither near nor far", "far", "all", "two ranges", "nowhere"],
)
def test_a_drafter_away_is_as_fast_from_one_round_trip_to_another(
    speeds: tuple[float, ...], ranges: list[tuple[float, float]], said: str
) -> None:
    one = BranchingPlacement(1.0, 0.8, 55.0, dict(zip((0.0, 20.0, 80.0), speeds, strict=True)))
    assert one.as_fast(one.textbook) == ranges
    assert reach(one.as_fast(one.textbook)) == said


def test_a_placement_is_shown_and_written_with_its_range(tmp_path: Path) -> None:
    one = BranchingPlacement(8.0, 0.8, 54.0, dict.fromkeys(RTTS_MS, 60.0) | {0.0: 48.0, 200.0: 50.0})
    assert "5 to 168 ms" in "\n".join(placement_lines([one]))
    write([], [one], 0, tmp_path / "branching.json")
    (written,) = json.loads((tmp_path / "branching.json").read_text())["placements"]
    assert written["as_fast_ms"] == [[5.0, 168.0]]


def test_placements_are_those_of_a_grid_whose_forwards_are_flat() -> None:
    found = placements([expected(cell) for cell in grid()])
    assert len(found) == 12
    assert all(one.textbook == SPEEDS[TEXTBOOK] and set(one.by_rtt.values()) == {SPEEDS[DEFAULT]} for one in found)
    assert placements([expected(WanCell(0.0, 8.0, 0.8, 0.0))]) == []


def test_the_command_refuses_what_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--cells", "R1", "--out", str(tmp_path / "branching.json")]) == 2
    assert "no cell" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
