"""Seeded simulations of whole deployments: every invariant after every callback, every text against plain decoding."""

from __future__ import annotations

import pytest

from tests.simulation.run import check, run
from tests.simulation.scenario import random_scenario

SEEDS = range(200)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_that_goes_wrong_changes_a_text(seed: int) -> None:
    check(random_scenario(seed))


@pytest.mark.parametrize("seed", [3, 26, 49, 88])
def test_a_seed_runs_in_the_same_way_every_time(seed: int) -> None:
    scenario = random_scenario(seed)
    assert run(scenario).trace == run(scenario).trace
