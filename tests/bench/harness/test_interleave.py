"""Every row runs on every prompt in every repeat, and has every turn equally often."""

from __future__ import annotations

from collections import Counter

from bench.harness.interleave import schedule


def test_the_order_rotates() -> None:
    assert [row for _, _, row in schedule(1, 3, 4)] == [0, 1, 2, 3, 1, 2, 3, 0, 2, 3, 0, 1]


def test_every_row_has_every_turn_equally_often() -> None:
    turns = Counter((turn % 4, row) for turn, (_, _, row) in enumerate(schedule(4, 8, 4)))
    assert set(turns.values()) == {8}
    assert len(turns) == 16
