"""Feeds that do not fit are refused with their field and value, and change nothing."""

from __future__ import annotations

import pytest

from specwire.core.model import SlotTable, TreeFeed
from specwire.lm import Feed


@pytest.fixture
def table() -> SlotTable:
    table = SlotTable(slots=2, context=8, vocabulary=10)
    table.write([Feed(0, 0, [1, 2, 3], 1)])
    table.commit([Feed(0, 0, [1, 2, 3], 1)])
    return table


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ([], "feeds: at least one"),
        ([Feed(2, 0, [1], 1)], "slot: must be from 0 to 1, not 2"),
        ([Feed(-1, 0, [1], 1)], "slot: must be from 0 to 1, not -1"),
        ([Feed(0, 4, [1], 1)], "start: slot 0 holds 3 positions, cannot be fed from 4"),
        ([Feed(0, -1, [1], 1)], "start: .* from -1"),
        ([Feed(0, 3, [], 0)], "tokens: slot 0 was fed none"),
        ([Feed(0, 3, [1] * 6, 1)], "tokens: slot 0 would hold 9 positions, the context is 8"),
        ([Feed(0, 3, [1, 10], 1)], "tokens: id 10 is outside the vocabulary of 10"),
        ([Feed(0, 3, [-1], 1)], "tokens: id -1 is outside"),
        ([Feed(0, 3, [1], 2)], "wanted: must be from 0 to the 1 tokens fed, not 2"),
        ([Feed(0, 3, [1], -1)], "wanted: .* not -1"),
        ([Feed(0, 3, [1], 1), Feed(0, 3, [1], 1)], "feeds: a slot occurs twice"),
    ],
)
def test_a_feed_that_does_not_fit_is_refused(table: SlotTable, feeds: list[Feed], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table.check(feeds)
    assert [table.cached(slot) for slot in range(2)] == [3, 0]


def tree(start: int, trunk: int, *ancestors: tuple[int, ...]) -> Feed:
    return Feed(0, start, [1] * max(1, len(ancestors)), 1, TreeFeed(trunk, ancestors))


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        (tree(3, 4, ()), "trunk: must be from 0 to the start 3 of slot 0, not 4"),
        (tree(3, -1, ()), "trunk: .* not -1"),
        (tree(3, 2), "ancestors: 0 of the 1 tokens of slot 0"),
        (tree(3, 2, (1,)), r"ancestors: those of row 3 of slot 0 must rise from 2 to below 3, not \[1\]"),
        (tree(3, 2, (3,)), r"ancestors: those of row 3 .* not \[3\]"),
        (tree(3, 2, (2,), (2, 2)), r"ancestors: those of row 4 .* not \[2, 2\]"),
        (tree(3, 1, (1,), (2, 1)), r"ancestors: those of row 4 .* not \[2, 1\]"),
        (tree(3, 2, (2,), (3,)), "ancestors: row 4 of slot 0 has others than row 3, its parent"),
        (tree(3, 3, (), (), (3,), (3, 4, 5)), "ancestors: row 6 .* others than row 5"),
        (tree(3, 3, (), (3,), (3, 4), (), (6,), ()), "tokens: slot 0 would hold 9 positions, the context is 8"),
        (tree(4, 3, ()), "start: slot 0 holds 3 positions, cannot be fed from 4"),
    ],
)
def test_a_tree_that_does_not_fit_is_refused(table: SlotTable, feed: Feed, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table.check([feed])
    assert table.cached(0) == 3


@pytest.mark.parametrize("feed", [tree(3, 3, (), (3,), (), (3,), (5,)), tree(3, 1, (), (1,), (1, 2), (1, 2, 5))])
def test_a_tree_that_fits_takes_rows_like_a_line(table: SlotTable, feed: Feed) -> None:
    table.check([feed])
    table.write([feed])
    table.commit([feed])
    assert table.cached(0) == feed.stop
    table.rollback(0, 3)
    assert (table.cached(0), table.written(0)) == (3, feed.stop)


def test_a_model_of_lines_refuses_every_tree_and_moves_no_row() -> None:
    table = SlotTable(slots=1, context=8, vocabulary=10, branches=False)
    table.commit([Feed(0, 0, [1, 2, 3], 1)])
    with pytest.raises(ValueError, match="tree: this model takes none, slot 0 was fed one"):
        table.check([tree(3, 3, ())])
    with pytest.raises(ValueError, match=r"rows: this model takes no trees, so that rows \[0, 2\] cannot move to 0"):
        table.keep(0, 0, [0, 2])
    assert table.cached(0) == 3
    table.keep(0, 1, [1])
    assert table.cached(0) == 2
    table.keep(0, 1, [])
    assert table.cached(0) == 1


@pytest.mark.parametrize(
    ("start", "rows", "message"),
    [
        (4, [], "start: slot 0 holds 3 positions, nothing can be kept from 4 on"),
        (-1, [0], "start: .* from -1 on"),
        (1, [0], r"rows: those kept of slot 0 must rise from 1 to below 3, not \[0\]"),
        (1, [2, 1], "rows: "),
        (1, [2, 2], "rows: "),
        (0, [1, 3], "rows: "),
        (3, [3], "rows: "),
    ],
)
def test_only_rising_rows_that_are_held_are_kept(table: SlotTable, start: int, rows: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table.keep(0, start, rows)
    assert table.cached(0) == 3


def test_what_is_kept_is_valid_and_the_rest_stale(table: SlotTable) -> None:
    table.keep(0, 0, [0, 2])
    assert (table.cached(0), table.written(0)) == (2, 3)
    table.keep(0, 2, [])
    assert table.cached(0) == 2
    with pytest.raises(ValueError, match="slot: must be from 0 to 1, not 2"):
        table.keep(2, 0, [])


def test_a_rollback_lowers_only_and_a_lower_start_is_one(table: SlotTable) -> None:
    feed = Feed(0, 1, [5], 1)
    table.check([feed])
    table.write([feed])
    assert table.cached(0) == 1
    table.commit([feed])
    assert (table.cached(0), table.written(0)) == (2, 3)
    table.rollback(0, 0)
    with pytest.raises(ValueError, match="slot 0 holds 0 positions and cannot be rolled back to 1"):
        table.rollback(0, 1)
    with pytest.raises(ValueError, match="slots: must be at least 1, not 0"):
        SlotTable(0, 8, 10)


def test_what_is_copied_is_valid_and_the_rest_of_the_target_stale(table: SlotTable) -> None:
    for slot, tokens in ((0, [1, 2, 3]), (1, [4] * 5)):
        feed = Feed(slot, 0, tokens, 1)
        table.write([feed])
        table.commit([feed])
    table.copy(0, 1, 2)
    assert (table.cached(0), table.cached(1), table.written(1)) == (3, 2, 5)
    table.copy(1, 0, 0)
    assert (table.cached(0), table.written(0)) == (0, 3)
    for arguments, message in (
        ((1, 0, 3), "length: slot 1 holds 2 positions, of which 3 cannot be copied"),
        ((1, 1, 1), "target: slot 1 cannot be copied to itself"),
        ((1, 9, 1), "slot: must be from 0 to 1, not 9"),
    ):
        with pytest.raises(ValueError, match=message):
            table.copy(*arguments)
    assert (table.cached(0), table.cached(1)) == (0, 2)
