"""Turns: every row on every prompt in every repeat, as often at each place; on a terminal, how far they are."""

from __future__ import annotations

import io
from collections import Counter

import pytest

from bench.harness.interleave import schedule, tracked
from specwire.progress import ERASED, LastLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_turns_are_counted_when_they_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("specwire.progress.REDRAW_S", 0.0)
    terminal = Terminal()
    seen: list[tuple[str, int]] = []
    for turn in tracked("abc", 3, "turns", line=LastLine(lambda: terminal)):
        seen.append((turn, terminal.getvalue().count(f"{len(seen)}/3")))
    assert seen == [("a", 1), ("b", 1), ("c", 1)]
    assert "3/3" in terminal.getvalue()
    assert terminal.getvalue().endswith(ERASED)


def test_the_order_rotates_so_that_every_row_has_every_turn_equally_often() -> None:
    assert [row for _, _, row in schedule(1, 3, 4)] == [0, 1, 2, 3, 1, 2, 3, 0, 2, 3, 0, 1]
    turns = Counter((turn % 4, row) for turn, (_, _, row) in enumerate(schedule(4, 8, 4)))
    assert (set(turns.values()), len(turns)) == ({8}, 16)
