"""A leak in a service is found by the bar that `make soak-load` has."""

from __future__ import annotations

import pytest

from bench.soak.load import LoadSettings, load
from specwire.rpc.process import say
from tests.faults.leaky_verifier import KEPT


@pytest.mark.whole_matrix
def test_a_verifier_that_keeps_a_kibibyte_of_each_session_misses_the_bar() -> None:
    report = load(LoadSettings(minutes=0.6, sessions=60, idle=0, rest_s=8.0), say, "tests.faults.leaky_verifier")
    missed = [bar.name for bar in report.bars if not bar.holds]
    assert "bytes kept of an ended session, verifier" in missed
    assert report.kept["verifier"].high >= KEPT
