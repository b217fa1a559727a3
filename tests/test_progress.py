"""specwire.progress: one line of a terminal, seldom redrawn, and nothing in a pipe."""

from __future__ import annotations

import io

import pytest

from specwire.progress import CELLS, ERASED, FEWEST_CELLS, REDRAW_S, LastLine, ProgressBar
from tests.deploy.screen import Screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def a_real_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.parametrize("how", ["pipe", "dumb", "quiet"])
def test_nothing_is_drawn_where_nobody_wants_it(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO() if how == "pipe" else Terminal()
    line = LastLine(lambda: stream)
    if how == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    line.quiet = how == "quiet"
    with ProgressBar("loading", 3, line=line) as bar:
        bar.update()
    assert stream.getvalue() == ""


def test_a_bar_is_redrawn_seldom_and_leaves_nothing() -> None:
    terminal, clock = Terminal(), Clock()
    with ProgressBar("loading", 1000, line=LastLine(lambda: terminal), clock=clock) as bar:
        for _ in range(1000):
            clock.now += REDRAW_S / 100
            bar.update()
    assert terminal.getvalue().count(ERASED) <= 12
    assert terminal.getvalue().endswith(ERASED)


def test_what_a_bar_says() -> None:
    bar = ProgressBar("loading", 4, line=LastLine(io.StringIO), done=1)
    assert bar.text(5.0) == f"loading [{'=' * (CELLS // 4)}{' ' * (CELLS * 3 // 4)}] 1/4  0:05"
    bar.at(2, "weights")
    assert bar.text(65.0) == f"loading [{'=' * (CELLS // 2)}{' ' * (CELLS // 2)}] 2/4  1:05, 2:10 left  weights"
    bar.at(4)
    assert bar.text(3661.0) == f"loading [{'=' * CELLS}] 4/4  1:01:01  weights"
    assert ProgressBar("waiting", line=LastLine(io.StringIO)).text(7.0) == "waiting  0:07"


@pytest.mark.parametrize(("width", "cells"), [(100, CELLS), (58, 20), (42, FEWEST_CELLS), (20, FEWEST_CELLS)])
def test_a_bar_gives_way_to_its_note(width: int, cells: int) -> None:
    bar = ProgressBar("starting", 2, line=LastLine(io.StringIO), done=1)
    bar.at(1, "layers 0 and 1.")
    full = cells // 2
    assert bar.text(65.0, width) == f"starting [{'=' * full}{' ' * (cells - full)}] 1/2  1:05  layers 0 and 1."


def test_lines_stand_above_the_bar() -> None:
    terminal, clock = Terminal(), Clock()
    line = LastLine(lambda: terminal)
    with ProgressBar("loading", 2, line=line, clock=clock) as bar:
        line.say("one")
        clock.now = 1.0
        bar.update()
        line.say("two", terminal)
        screen = Screen(100, 24)
        screen.write(terminal.getvalue())
        assert screen.text.splitlines()[:2] == ["one", "two"]
        assert screen.text.splitlines()[2].startswith("loading [====")
    screen = Screen(100, 24)
    screen.write(terminal.getvalue())
    assert screen.text == "one\ntwo"


def test_a_bar_is_never_longer_than_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second row could not be taken back."""
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    with ProgressBar("a name that is far too long for this", 2, line=LastLine(lambda: terminal)):
        assert len(terminal.getvalue().removeprefix(ERASED)) == 19
