"""The share of positions that a drafter was late for, of late."""

from __future__ import annotations

import pytest

from specwire.telemetry.tally import REMEMBERED_PASSES, DrafterTally


def after(*advances: tuple[int, int]) -> DrafterTally:
    tally = DrafterTally()
    for due, late in advances:
        tally.advance(due, late)
    return tally


def test_what_was_long_ago_counts_little() -> None:
    assert after().misses == 0.0
    slow = after(*[(4, 4)] * REMEMBERED_PASSES)
    assert slow.misses == pytest.approx(1.0, abs=0.02)
    assert (slow.due, slow.late) == (4 * REMEMBERED_PASSES, 4 * REMEMBERED_PASSES)
    recovered = after(*[(4, 4)] * REMEMBERED_PASSES, *[(4, 0)] * REMEMBERED_PASSES)
    assert recovered.misses == pytest.approx(0.0, abs=0.02)
    assert after(*[(2, 1)] * (4 * REMEMBERED_PASSES)).misses == pytest.approx(0.5, abs=0.02)


def test_an_advance_that_decides_nothing_new_changes_nothing() -> None:
    tally = after((4, 2))
    before = tally.misses
    tally.advance(0, 0)
    assert tally.misses == before
