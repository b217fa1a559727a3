"""Feeds that do not fit are refused with their field and value, and change nothing."""

from __future__ import annotations

import pytest

from specwire.lm import Feed
from specwire.lm.kv_cache import SlotTable


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


def test_a_lower_start_is_a_rollback(table: SlotTable) -> None:
    feed = Feed(0, 1, [5], 1)
    table.check([feed])
    table.write([feed])
    assert table.cached(0) == 1
    table.commit([feed])
    assert table.cached(0) == 2
    assert table.written(0) == 3


def test_rollback_lowers_only(table: SlotTable) -> None:
    table.rollback(0, 3)
    table.rollback(0, 0)
    with pytest.raises(ValueError, match="slot 0 holds 0 positions and cannot be rolled back to 1"):
        table.rollback(0, 1)


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


def test_a_model_has_at_least_one_slot() -> None:
    with pytest.raises(ValueError, match="slots: must be at least 1, not 0"):
        SlotTable(0, 8, 10)
