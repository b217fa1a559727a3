"""How many rows a forward computes, where a forward of another number of rows than the last one costs extra.

A runtime that plans its memory and kernels for the shapes that it meets has work to do when they change. Rows of
padding are then cheaper than a change, as long as there are few.
"""

from __future__ import annotations

from collections.abc import Callable

# Rows of the two shapes that are timed, and how often each is.
ONE, FEW = 1, 5
TIMES = 4
# Where rows seem to cost nothing. Below the drop from the widest to the narrowest window that a verifier measures at
# start: V(1) must not be measured with the padding of the widest.
MOST_PRICE = 16
# Beyond so many rows a growth is to a multiple of it, where a change costs as much: with windows that come and go, a
# batch has another number of rows in every step.
GRAIN = 4


class SteadyRows:
    """Keeps to the last number of rows until padding has cost as much as a change would have.

    It then costs at most twice what the best choice in hindsight would have (renting until the price is paid), beside
    the grain of each growth. `price` is what a change costs, in rows.
    """

    def __init__(self, price: int) -> None:
        self.price = price
        self._rows = 0
        self._padded = 0

    def rows(self, needed: int) -> int:
        """Rows to compute, at least `needed`."""
        if needed > self._rows:
            self._rows, self._padded = self._grown(needed), 0
        self._padded = self._padded + self._rows - needed if needed < self._rows else 0
        if self._padded > self.price:
            self._rows, self._padded = needed, 0
        return self._rows

    def _grown(self, needed: int) -> int:
        return -(-needed // GRAIN) * GRAIN if needed > GRAIN <= self.price else needed


def price_of_change(time: Callable[[int], float]) -> int:
    """What a change of shape costs, in rows; `time` runs a forward of so many rows and returns its seconds.

    Minima of a few: whatever else the machine does only adds.
    """
    changed: dict[int, list[float]] = {ONE: [], FEW: []}
    for _ in range(TIMES):
        for rows, seconds in changed.items():
            seconds.append(time(rows))
    steady = {rows: min(time(rows) for _ in range(TIMES)) for rows in (FEW, ONE)}
    change = min(min(changed[rows]) - steady[rows] for rows in steady)
    row = (steady[FEW] - steady[ONE]) / (FEW - ONE)
    if change <= 0:
        return 0
    return min(int(change / row), MOST_PRICE) if row > 0 else MOST_PRICE
