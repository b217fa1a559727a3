"""Rank 0 of a split model: whatever its runner does it has the runners of the other ranks do as well."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import torch

from specwire.lm import orders
from specwire.lm.cached import Runner
from specwire.lm.checks import first_line
from specwire.lm.interface import Feed, ModelLost
from specwire.lm.party import Party

# ----------------------------------------------------------------------------------------------------------------------
# What rank 0 has the other ranks of a split model do, as integers: its runner's calls, in its order.

RUN, ZERO, COPY = range(3)
# int64, for this machine only.
WIDE = "q"


def to_run(feeds: Sequence[Feed]) -> bytes:
    numbers = [RUN]
    for feed in feeds:
        numbers += [feed.slot, feed.start, feed.wanted, len(feed.tokens), *feed.tokens]
    return _packed(numbers)


def to_zero(slot: int, stop: int) -> bytes:
    return _packed([ZERO, slot, stop])


def to_copy(source: int, target: int, stop: int) -> bytes:
    return _packed([COPY, source, target, stop])


def obey(runner: Runner, order: bytes) -> None:
    """Do it on this rank's share; what comes out is rank 0's to use."""
    kind, *numbers = array(WIDE, order)
    if kind == RUN:
        runner.run(list(_feeds(iter(numbers))))
    elif kind == ZERO:
        runner.zero(*numbers)
    else:
        runner.copy(*numbers)


def _packed(numbers: Sequence[int]) -> bytes:
    return array(WIDE, numbers).tobytes()


def _feeds(numbers: Iterator[int]) -> Iterator[Feed]:
    for slot in numbers:
        start, wanted, count = (next(numbers) for _ in range(3))
        yield Feed(slot, start, [next(numbers) for _ in range(count)], wanted)


class LeadingRunner:
    """`Runner` over all ranks.

    What fails in a forward leaves the ranks at different places in it, so it ends the model: ModelLost.
    """

    def __init__(self, runner: Runner, party: Party) -> None:
        self.runner = runner
        self._party = party

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        self._tell(orders.to_run(feeds))
        try:
            return self.runner.run(feeds)
        except Exception as error:
            raise self._lost(error) from error

    def zero(self, slot: int, stop: int) -> None:
        self._tell(orders.to_zero(slot, stop))
        self.runner.zero(slot, stop)

    def copy(self, source: int, target: int, stop: int) -> None:
        self._tell(orders.to_copy(source, target, stop))
        self.runner.copy(source, target, stop)

    @property
    def kv_bytes(self) -> int:
        """Of all ranks, which hold equal shares."""
        return self.runner.kv_bytes * self._party.size

    def _tell(self, order: bytes) -> None:
        try:
            self._party.tell(order)
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> ModelLost:
        return ModelLost(self._party.loss() or f"{self._party.size} ranks failed together: {first_line(error)}")
