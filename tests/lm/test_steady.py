"""Rows of padding against changes of shape, by numbers."""

from __future__ import annotations

import random

import pytest

from specwire.lm.runners.openvino.graph import GRAIN, MOST_PRICE, SteadyRows, price_of_change


def test_padding_until_it_has_cost_what_a_change_costs() -> None:
    steady = SteadyRows(price=8)
    assert [steady.shape(needed) for needed in (4, 1, 1, 1, 1, 4, 4, 3, 3)] == [4, 4, 4, 1, 1, 4, 4, 4, 4]


def test_a_full_forward_begins_the_count_anew() -> None:
    steady = SteadyRows(price=8)
    assert [steady.shape(needed) for needed in (8, 1, 8, 1, 8, 1, 8, 1)] == [8] * 8


def test_a_growth_is_to_a_multiple_where_a_change_costs_as_much() -> None:
    assert [SteadyRows(price=GRAIN).shape(needed) for needed in (1, 3, 4, 5, 17, 512)] == [1, 3, 4, 8, 20, 512]
    assert [SteadyRows(price=GRAIN - 1).shape(needed) for needed in (5, 17)] == [5, 17]


def test_what_is_needed_all_the_time_is_what_is_computed() -> None:
    """Nine sessions that decode plainly have nothing from rows of padding."""
    steady = SteadyRows(price=8)
    assert [steady.shape(9) for _ in range(6)] == [12, 12, 9, 9, 9, 9]


def test_without_a_price_nothing_is_padded() -> None:
    steady = SteadyRows(price=0)
    assert [steady.shape(needed) for needed in (7, 1, 512, 3, 3)] == [7, 1, 512, 3, 3]


@pytest.mark.parametrize("price", [0, 3, 16])
def test_never_fewer_rows_than_needed_nor_more_padding_than_the_price(price: int) -> None:
    chance, steady = random.Random(price), SteadyRows(price)
    for _ in range(500):
        needed = chance.randint(1, 40)
        assert needed <= steady.shape(needed) <= needed + price


class Runtime:
    """Seconds of a forward: so much per row, so much where the shape is another than before."""

    def __init__(self, row: float, change: float) -> None:
        self.row, self.change, self.last = row, change, 0

    def time(self, rows: int) -> float:
        seconds = 1.0 + self.row * rows + (self.change if rows != self.last else 0.0)
        self.last = rows
        return seconds


@pytest.mark.parametrize(
    ("row", "change", "price"),
    [(0.125, 1.0, 8), (0.125, 0.0, 0), (4.0, 1.0, 0), (0.0, 1.0, MOST_PRICE), (0.0, 0.0, 0), (0.001, 10.0, MOST_PRICE)],
)
def test_the_price_is_measured_in_rows(row: float, change: float, price: int) -> None:
    assert price_of_change(Runtime(row, change).time) == price
