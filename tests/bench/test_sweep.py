"""The planner comes close to the best fixed setting of a cell, which is found by sweep: here in a few of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.sweep import (
    NEEDED,
    Crowd,
    Swept,
    bar,
    experienced,
    main,
    report,
    sessions_of,
    sweep,
)
from bench.wan.cells import WanCell
from specwire import sim

TOKENS = 128
NEAR_AND_FAR = [WanCell(10.0, 3.0, 0.8, 0.0), WanCell(80.0, 8.0, 0.9, 0.05)]


CROWD = Crowd(3.0, 0.6, 0.02, shared=True, sessions=2, slope_between=0.2, repeats=0.5)


@pytest.mark.parametrize("cell", [*NEAR_AND_FAR, CROWD], ids=lambda cell: cell.name)
def test_the_controller_comes_close_to_the_best_fixed_setting(cell: WanCell | Crowd) -> None:
    swept = sweep(cell, 2, TOKENS)
    assert swept.share >= NEEDED
    assert bar([swept]).holds
    assert cell.name in report([swept])


def test_the_best_setting_is_the_fastest_over_all_sessions_and_not_over_the_first() -> None:
    sessions = sessions_of(WanCell(0.0, 3.0, 0.8, 0.02), 3, TOKENS)
    assert len({tuple(one.ranks) for one in sessions}) == 3
    best = sim.optimum_over(sessions)
    again = [sim.simulate(one, best.policy) for one in sessions]
    elapsed_us = sum(one.elapsed_us for one in again)
    assert best.tokens_per_second == pytest.approx(len(sessions) * TOKENS / elapsed_us * 1e6)
    for other in ("off", "lockstep:4", "stream:1,16,0"):
        slower = sum(sim.simulate(one, sim.fixed(other)).elapsed_us for one in sessions)
        assert slower >= elapsed_us


def test_sessions_learn_from_those_before_them() -> None:
    (cell,) = sessions_of(WanCell(0.0, 1.0, 0.9, 0.0), 1, TOKENS)
    first = sim.simulate(cell)
    again = sim.simulate(cell, learnt=first.learnt)
    assert experienced([cell]) == again.tokens_per_second != first.tokens_per_second


def test_the_command_refuses_what_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--rtts", "7", "--out", str(tmp_path / "sweep.json")]) == 2
    assert "no such cells" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_bar_names_the_worst_cell() -> None:
    swept = [Swept("a", "off", 30.0, 30.0), Swept("b", "off", 30.0, 28.0)]
    assert "worst b" in bar(swept).name
    assert not bar(swept).holds
    assert bar(swept[:1]).holds
