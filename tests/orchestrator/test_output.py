"""A reader that comes back goes on exactly where its text ended."""

from __future__ import annotations

from orchestrator.output import Output
from specwire.core.acceptance import Outcome
from specwire.core.effects import Emit

D = Outcome.DIRECT


def test_text_that_was_withheld_is_not_lost_to_a_reader_that_comes_back() -> None:
    output = Output(2)
    output.add(Emit(2, (5, 6), (D, D), "a", (1, 2)))  # "b" may begin a stop string
    output.add(Emit(4, (7,), (D,), "bc", (3,)))
    back = output.cursor_at(4)
    assert (back.tokens, back.characters) == (2, 1)
    assert output.since(back).text == "bc"


def test_a_position_within_a_piece_is_where_its_tokens_text_ends() -> None:
    output = Output(2)
    output.add(Emit(2, (5, 6), (D, D), "ab", (1, 2)))
    assert [output.cursor_at(at).characters for at in (2, 3, 4)] == [0, 1, 2]
