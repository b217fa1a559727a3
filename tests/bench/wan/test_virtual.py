"""The grid, the cells of it that are measured, and what the simulator expects of them, by trace and by software."""

from __future__ import annotations

import pytest

from bench.wan.cells import HEAVY, LIGHT, NAMED, SHOWN, WanCell, chosen, grid, typical_trace
from bench.wan.disciplines import CHAIN, DEFAULT, DISCIPLINES, PLAIN, TEXTBOOK, measured_in, orchestration
from bench.wan.emulated import software_of
from bench.wan.traces import acceptance
from bench.wan.virtual import Software, expect
from specwire.core.messages import parse_plan

TOKENS = 64


def test_disciplines_have_speeds_and_baselines_have_settings_that_can_be_run() -> None:
    found = expect(SHOWN, tokens=TOKENS)
    assert set(found.speeds) == set(DISCIPLINES)
    for name in set(DISCIPLINES) & set(found.settings):
        assert orchestration(found.settings[name]).patient
    # By arithmetic: the way there and back, then 30 ms a token.
    assert found.speeds[PLAIN] == pytest.approx(TOKENS / (0.08 + TOKENS * 0.03), rel=0.01)
    assert found.optimum_of_chains >= max(found.speeds[PLAIN], found.speeds[TEXTBOOK])
    assert found.speeds[CHAIN] <= 1.1 * found.optimum_of_chains


def test_where_further_tokens_are_dear_only_what_extends_several_is_simulated() -> None:
    found = expect(SHOWN.heavy(), tokens=TOKENS)
    assert list(found.speeds) == list(measured_in(SHOWN.heavy())) == [PLAIN, CHAIN, DEFAULT]
    loaded = expect(SHOWN.heavy(), Software(1000.0, 1000.0), TOKENS)  # software slows disciplines and not the optimum
    assert loaded.speeds[PLAIN] < found.speeds[PLAIN]
    assert (loaded.optimum, loaded.optimum_of_chains) == (found.optimum, found.optimum_of_chains)


def test_the_default_is_held_against_settings_that_branch_and_the_chain_is_not() -> None:
    found = expect(WanCell(20.0, 8.0, 0.8, 0.0), tokens=TOKENS)
    assert found.optimum > 1.1 * found.optimum_of_chains >= found.speeds[CHAIN]
    chains, trees = (parse_plan(found.settings[name]) for name in ("optimum of chains", "optimum"))
    assert chains is not None
    assert trees is not None
    assert chains.pace.branches == 1 < trees.pace.branches


def test_rounds_of_two_lengths_tell_hops_and_draft_tokens_apart() -> None:
    """A round is V and a step's software, k draft tokens with theirs, four hops."""
    rounds = {k: 30_000 + 400 + k * (8_000 + 250) + 4 * 500.0 for k in (1, 7)}
    assert software_of(rounds, 400.0, 30_000.0, 8_000.0) == Software(400.0, 500.0, 250.0)
    assert software_of({1: 30_000.0, 7: 30_000.0}, -5.0, 30_000.0, 8_000.0) == Software()


def test_eighteen_cells_of_it_are_measured_each_with_two_drafters_and_its_acceptance() -> None:
    light = [cell for cell in NAMED if cell.row_cost == LIGHT]
    assert len(set(light)) == 18
    assert {SHOWN} <= set(light) <= set(grid())
    assert [cell.heavy() for cell in light] == [cell for cell in NAMED if cell.row_cost == HEAVY]
    for cell in NAMED:
        assert abs(acceptance(cell.trace.bits) - cell.acceptance) < 0.002
    assert abs(acceptance(typical_trace().bits) - 0.72) < 0.05


def test_cells_are_chosen_by_name() -> None:
    assert chosen([]) == NAMED
    assert chosen(["R80-d8-a0.8-s0-b0.02"]) == (SHOWN,)
    with pytest.raises(ValueError, match="cells: no cell 'R1'; there are R0-d8-a0.4-s0-b0.02, "):
        chosen(["R1"])
