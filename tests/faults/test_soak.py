"""A short soak: many sessions, one monkey."""

from __future__ import annotations

import os

from bench.soak.settings import Settings
from bench.soak.soak import soak
from deploy.processes import descendants
from specwire.rpc.process import say

SETTINGS = Settings(minutes=0.3, seed=11, sessions=6, every=2.0)


def test_nothing_is_lost_repeated_or_wrong() -> None:
    report = soak(SETTINGS, say)
    assert report.holds, report.shown()
    assert report.tally.sessions >= SETTINGS.sessions
    assert sum(report.faults.values()) > 0
    assert descendants(os.getpid()) == []
