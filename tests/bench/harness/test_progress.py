"""A measurement on a terminal shows how far it is, whatever it measures."""

from __future__ import annotations

import io

import pytest

from bench.harness.interleave import tracked
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


def test_in_a_pipe_they_are_the_turns_alone() -> None:
    pipe = io.StringIO()
    assert list(tracked(range(3), 3, line=LastLine(lambda: pipe))) == [0, 1, 2]
    assert pipe.getvalue() == ""
