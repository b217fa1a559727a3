"""Provisional text is replaced in place: the screen shows the decided text, and behind it the newest guess."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from deploy.cli.terminal import MARKED, RESET, ProvisionalTail
from specwire.rpc.process import visible
from tests.deploy.screen import COMBINING, WIDE, Screen

TEXT = st.text(f"ab \n\t\r\b\x1b\x9b{WIDE}{COMBINING}", max_size=24)
# What becomes of a guess: it is confirmed in part (how many characters) and then goes on, or other text is decided.
STEPS = st.lists(st.tuples(st.integers(0, 12), TEXT, TEXT), max_size=12)


def screen_of(text: str, columns: int, lines: int) -> str:
    screen = Screen(columns, lines)
    screen.write(text)
    return screen.text


@given(STEPS, st.integers(3, 12), st.integers(2, 7))
def test_the_screen_shows_decided_text_and_the_newest_guess(
    steps: list[tuple[int, str, str]], columns: int, lines: int
) -> None:
    screen, tail = Screen(columns, lines), ProvisionalTail(lambda: os.terminal_size((columns, lines)))
    decided = guess = ""
    for confirmed, other, following in steps:
        text = guess[:confirmed] + other
        screen.write(tail.decided(text, f"\x1b[32m{visible(text)}\x1b[0m"))
        decided, guess = decided + visible(text), following
        screen.write(tail.show(guess))
        shown = screen.text
        screen.write(tail.show(""))
        assert screen.text == screen_of(decided, columns, lines)
        screen.write(tail.show(guess))
        assert screen.text == shown
        seen = visible(guess)
        assert any(shown == screen_of(decided + seen[:end], columns, lines) for end in range(len(seen) + 1))


def fixed(columns: int = 20, lines: int = 10) -> ProvisionalTail:
    return ProvisionalTail(lambda: os.terminal_size((columns, lines)))


def test_a_guess_is_marked_and_taken_back() -> None:
    tail = fixed()
    assert tail.decided("abc", "abc") == "abc"
    assert tail.show("de") == f"{MARKED}de{RESET}"
    assert tail.show("de") == ""
    assert tail.show("x") == f"\x1b[4G\x1b[J{MARKED}x{RESET}"
    assert tail.show("") == "\x1b[4G\x1b[J"
    assert tail.show("") == ""


def test_what_was_confirmed_leaves_the_rest_standing() -> None:
    tail = fixed()
    tail.show("abcd")
    assert tail.decided("ab", "ab") == f"\x1b[1G\x1b[Jab{MARKED}cd{RESET}"
    assert tail.show("cd") == ""
    assert tail.decided("x", "x") == "\x1b[3G\x1b[Jx"


def test_a_guess_that_wraps_is_taken_back_row_by_row() -> None:
    tail = fixed(columns=5)
    tail.decided("abc", "abc")
    tail.show("defgh\ni")
    assert tail.show("") == "\x1b[2A\x1b[4G\x1b[J"


def test_behind_a_full_row_nothing_is_shown_until_more_is_decided() -> None:
    tail = fixed(columns=5)
    tail.decided("abcde", "abcde")
    assert tail.show("fg") == ""
    assert tail.decided("f", "f") == f"f{MARKED}g{RESET}"


def test_a_long_guess_is_cut_to_half_of_the_screen() -> None:
    tail = fixed(columns=5, lines=4)
    assert tail.show("a" * 100) == f"{MARKED}{'a' * 15}{RESET}"


def test_a_drafter_cannot_send_control_sequences() -> None:
    assert fixed(columns=80).show("a\x1b[2J\rb\x9bc\x07") == rf"{MARKED}a\x1b[2J\x0db\x9bc\x07{RESET}"


def test_a_drafter_cannot_reorder_the_text_around() -> None:
    assert fixed(columns=80).show("a\u202eb\u2066c\u2069\u05d0") == f"{MARKED}a\\u202eb\\u2066c\\u2069\u05d0{RESET}"


def test_without_provisional_text_nothing_is_added() -> None:
    tail = fixed(columns=5)
    assert "".join(tail.decided(text, text) for text in ("abc", "defgh", "\n", "")) == "abcdefgh\n"
