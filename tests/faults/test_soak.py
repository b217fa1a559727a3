"""A short soak: a few sessions and one monkey; and a small crowd."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.harness import ROOT
from bench.harness.child import descendants
from bench.soak.load import LoadSettings, load
from bench.soak.run import SoakSettings, soak
from specwire.rpc.process import say
from tests.faults.leaky_verifier import KEPT

SETTINGS = SoakSettings(minutes=0.3, seed=11, sessions=6, every=2.0)


def test_nothing_is_lost_repeated_or_wrong() -> None:
    before = set(descendants(os.getpid()))  # other tests' services
    report = soak(SETTINGS, say)
    assert report.holds, report.shown()
    assert report.tally.sessions >= SETTINGS.sessions
    assert sum(report.faults.values()) > 0
    assert report.kinds == 20
    assert report.filed["other OK"] >= 2
    assert set(descendants(os.getpid())) <= before


@pytest.mark.whole_matrix
def test_ctrl_c_ends_it_with_the_report_so_far(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    words = ("-m", "bench.soak.run", "--minutes", "60", "--sessions", "3", "--every", "0", "--out", str(out))
    with subprocess.Popen([sys.executable, *words], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:  # until they have begun, and then until some have ended
            if " sessions, " in line:
                break
        below = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait(60) == 1
    report = json.loads(out.read_text())
    assert report["interrupted"]
    missed = {bar["name"] for bar in report["bars"] if not bar["holds"]}
    # What comes now and then may not have come yet.
    later = {"kinds of a neighbour's requests", "cuts of a log in a file", "notes refused by a full part of a log"}
    assert missed - later == {"minutes", "kinds of faults", "interruptions"}
    assert report["sessions"] > 0
    assert len(below) >= 7
    assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]


def test_a_small_crowd() -> None:
    """Sessions come and go; those that nobody reads stay where they are, well before their end."""
    before = set(descendants(os.getpid()))  # other tests' services
    report = load(LoadSettings(minutes=0.05, sessions=8, idle=2, rest_s=0.0), say)
    assert report.errors == []
    assert (report.mismatches, report.judged > 0) == (0, True)
    assert all(first == last < report.unread for first, last in report.idle), report.idle
    assert len(report.idle) == 2
    assert report.tokens_per_second > 0
    assert set(descendants(os.getpid())) <= before


@pytest.mark.whole_matrix
def test_a_verifier_that_keeps_a_kibibyte_of_each_session_misses_the_bar() -> None:
    """A leak in a service is found by the bar that `make soak-load` has."""
    report = load(LoadSettings(minutes=0.6, sessions=60, idle=0, rest_s=8.0), say, "tests.faults.leaky_verifier")
    missed = [bar.name for bar in report.bars if not bar.holds]
    assert "bytes kept of an ended session, verifier" in missed
    assert report.kept["verifier"].high >= KEPT
