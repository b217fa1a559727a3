"""The grid and the cells of it that are measured."""

from __future__ import annotations

from itertools import combinations

import pytest

from bench.wan.cells import CORNERS, HEAVY, LIGHT, NAMED, SHOWN, chosen, grid, typical_trace
from bench.wan.traces import acceptance


def test_the_grid_has_every_combination_once() -> None:
    cells = list(grid())
    assert len(cells) == len(set(cells)) == 7 * 3 * 3 * 4
    assert len({cell.name for cell in cells}) == len(cells)


def test_eighteen_cells_of_it_are_measured_each_with_two_drafters() -> None:
    light = [cell for cell in NAMED if cell.row_cost == LIGHT]
    assert len(set(light)) == 18
    assert set(light) <= set(grid())
    assert SHOWN in light
    assert [cell.heavy() for cell in light] == [cell for cell in NAMED if cell.row_cost == HEAVY]
    assert len(NAMED) == 36


def test_the_corners_show_every_two_settings_in_all_four_ways() -> None:
    values = [(cell.rtt_ms, cell.draft_ms, cell.acceptance, cell.slope) for cell in CORNERS]
    for one, other in combinations(range(4), 2):
        assert len({(value[one], value[other]) for value in values}) == 4


def test_a_cells_trace_has_its_acceptance() -> None:
    for cell in NAMED:
        assert abs(acceptance(cell.trace.bits) - cell.acceptance) < 0.002
    assert abs(acceptance(typical_trace().bits) - 0.72) < 0.05


def test_cells_are_chosen_by_name() -> None:
    assert chosen([]) == NAMED
    assert chosen(["R80-d8-a0.8-s0-b0.02"]) == (SHOWN,)
    with pytest.raises(ValueError, match="cells: no cell 'R1'; there are R0-d8-a0.4-s0-b0.02, "):
        chosen(["R1"])
