"""Text painted by outcome."""

from __future__ import annotations

import pytest

from deploy.cli.terminal import (
    BLUE,
    GREEN,
    RESET,
    YELLOW,
    Painter,
    painter,
    table,
    wants_colour,
)
from specwire.client import Chunk
from specwire.core.messages import Outcome

ACCEPTED, RECOVERED, BONUS, DIRECT = Outcome.ACCEPTED, Outcome.RECOVERED, Outcome.BONUS, Outcome.DIRECT


def chunk(text: str, text_ends: list[int], outcomes: list[Outcome]) -> Chunk:
    return Chunk(0, tuple(range(len(outcomes))), tuple(outcomes), text, tuple(text_ends), None, 0)


def test_each_token_has_its_colour() -> None:
    painted = Painter(True).chunk(chunk("abcde", [1, 3, 4, 5], [ACCEPTED, RECOVERED, BONUS, DIRECT]))
    assert painted == f"{GREEN}a{RESET}{YELLOW}bc{RESET}{BLUE}d{RESET}{BLUE}e{RESET}"


def test_text_released_later_keeps_the_colour_of_its_token() -> None:
    painter = Painter(True)
    assert painter.chunk(chunk("a", [1, 4], [ACCEPTED, RECOVERED])) == f"{GREEN}a{RESET}"
    assert painter.text("bcd") == f"{YELLOW}bcd{RESET}"
    assert painter.chunk(chunk("e", [5], [BONUS])) == f"{BLUE}e{RESET}"


def test_a_token_without_text_colours_nothing() -> None:
    painter = Painter(True)
    assert painter.chunk(chunk("", [0, 0], [ACCEPTED, RECOVERED])) == ""
    assert painter.chunk(chunk("x", [1], [BONUS])) == f"{BLUE}x{RESET}"


HOSTILE = "a\x1b]0;X\x07\x1b[2J\x9b1m\rb\n"
SHOWN = "a\\x1b]0;X\\x07\\x1b[2J\\x9b1m\\x0db\n"


@pytest.mark.parametrize("colour", [True, False])
def test_a_terminal_gets_no_commands_from_a_text(colour: bool) -> None:
    """Nor from one whose escape sequences come in pieces."""
    painter = Painter(colour)
    pieces = [painter.chunk(chunk(each, [at + 1], [DIRECT])) for at, each in enumerate(HOSTILE)]
    assert "".join(pieces).replace(BLUE, "").replace(RESET, "") == SHOWN
    assert painter.plain(HOSTILE) == SHOWN


@pytest.mark.parametrize(("terminal", "shown"), [(True, SHOWN), (False, HOSTILE)])
def test_stdout_gets_what_it_can_take(terminal: bool, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR has no part in it."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert painter().text(HOSTILE) == shown


def test_a_cell_stays_one() -> None:
    assert table([["name", "n"], ["x\n\x1b[2J", "10"]]).splitlines()[2] == "x \\x1b[2J  10"


def test_table_aligns_its_columns() -> None:
    assert table([["name", "n"], ["x", "10"]]) == "name   n\n----  --\nx     10"


@pytest.mark.parametrize(("terminal", "no_color", "wanted"), [(True, "", True), (True, "1", False), (False, "", False)])
def test_colour_is_for_terminals_whose_user_wants_it(
    terminal: bool, no_color: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("NO_COLOR", no_color)
    assert wants_colour() is wanted
