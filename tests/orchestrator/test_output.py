"""A reader that comes back goes on exactly where its text ended."""

from __future__ import annotations

import asyncio

from orchestrator.session.output import MOST_REPORTED, Cursor, Output, Replay
from specwire.core.messages import Emit, EmitEnd, End, FinishReason, Outcome, TokenLogprobs
from specwire.text.output import OutputText
from tests.text.tokenizers_for_tests import byte_level

D = Outcome.DIRECT


def test_text_that_was_withheld_is_not_lost_to_a_reader_that_comes_back() -> None:
    output = Output(2)
    output.add(Emit(2, (5, 6), (D, D), "a", (1, 2), (1, 1)))  # "b" may begin a stop string
    output.add(Emit(4, (7,), (D,), "bc", (3,), (3,)))
    back = output.cursor_at(4)
    assert (back.tokens, back.characters) == (2, 1)
    assert output.since(back).text == "bc"


def test_a_position_within_a_piece_is_where_its_tokens_text_ends() -> None:
    output = Output(2)
    output.add(Emit(2, (5, 6), (D, D), "ab", (1, 2), (1, 2)))
    assert [output.cursor_at(at).characters for at in (2, 3, 4)] == [0, 1, 2]


def test_a_piece_that_ends_within_an_append_has_the_text_that_others_would_release() -> None:
    """Of one append of many tokens a reader gets MOST_REPORTED, the last of which may begin a stop string."""
    (a, *_), (b, *_) = byte_level().encode("a").ids, byte_level().encode("b").ids
    letters = [a] * (MOST_REPORTED - 1) + [b, a]
    told = tuple(TokenLogprobs(-1.0) for _ in letters)
    release = OutputText(byte_level(), ("bb",)).push(letters)
    driven, elsewhere = Output(2), Output(2)
    shown = release.text, release.text_ends, release.released
    driven.add(Emit(2, tuple(letters), (D,) * len(letters), *shown, told))
    replay = Replay(elsewhere, OutputText(byte_level(), ("bb",)))
    asyncio.run(replay.extend(driven))
    first = driven.since(Cursor())
    assert len(first.tokens) == MOST_REPORTED
    rest = elsewhere.since(elsewhere.cursor_at(first.position + len(first.tokens)))
    assert first.text + rest.text == release.text == driven.text


async def test_reports_come_in_pieces_that_a_message_can_hold() -> None:
    output, count = Output(1), 2 * MOST_REPORTED + 5
    tokens, ends = tuple(range(count)), tuple(range(1, count + 1))
    told = tuple(TokenLogprobs(-float(token)) for token in tokens)
    output.add(Emit(1, tokens, (D,) * count, "x" * count, ends, ends, told))
    output.finish(EmitEnd(End(FinishReason.LENGTH, "", count), ""))
    pieces = [piece async for piece in output.follow(Cursor())]
    assert [len(piece.tokens) for piece in pieces] == [MOST_REPORTED, MOST_REPORTED, 5]
    assert tuple(each for piece in pieces for each in piece.logprobs) == told
    assert [(piece.position, len(piece.text)) for piece in pieces[1:]] == [
        (1 + MOST_REPORTED, MOST_REPORTED),
        (1 + 2 * MOST_REPORTED, 5),
    ]
