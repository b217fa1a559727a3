"""`make bench-edges`, a short run: every part, real processes, and no text that a lost verifier has changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench.edges import run
from deploy.stack.processes import descendants


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_a_short_measurement_has_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shares of so short a time are not held against their bars."""
    out = tmp_path / "edges.json"
    assert run.main(["--edges", "3", "--repeats", "1", "--seconds", "2", "--out", str(out)]) in (0, 1)
    found = json.loads(out.read_text())
    assert [bar["holds"] for bar in found["bars"]][-1]
    assert set(found["fair"]["flooded"][0]) == set(run.TENANTS)
    assert all(part["before"]["tokens_per_second"] > 0 for part in (found["loss"], found["storm"]))
    assert (found["storm"]["sessions"], found["storm"]["wrong"], found["storm"]["failed"]) == (6, 0, 0)
    assert "while it is exchanged" in capsys.readouterr().out
    assert descendants(os.getpid()) == []


def test_fairness_is_jains_index() -> None:
    assert run.jain([5.0, 5.0, 5.0, 5.0]) == 1.0
    assert run.jain([1.0, 0.0, 0.0, 0.0]) == 0.25


def test_what_cannot_be_measured_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--edges", "0"]) == 2
    assert "edges: must be at least 1, not 0" in capsys.readouterr().err
