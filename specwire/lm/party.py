"""The ranks of a split model, as one of them sees them. Who starts and ends them is not this package's business."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import distributed

# The option that asks for them.
FIELD = "tensor-parallel-size"


class Party(Protocol):
    """Rank 0 computes for the caller, the others repeat what its runner does (`specwire.lm.orders`)."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def meet(self) -> str:
        """Return, once all ranks are there, the path of a file that they find each other by.

        Raises:
            OSError: a rank could not be started, or has ended.
        """
        ...

    def tell(self, order: bytes) -> None:
        """Of rank 0: have every other rank do this, after all that it was told before. OSError if one is gone."""
        ...

    def loss(self) -> str:
        """Why a rank is gone; "" if none is known to be."""
        ...

    def at_end(self, leave: Callable[[], None]) -> None:
        """Call this once the party is over."""
        ...


class Rank(NamedTuple):
    """One process of those that a model is split over, connected. loading: the same ranks, with more patience."""

    number: int
    size: int
    group: distributed.ProcessGroup
    loading: distributed.ProcessGroup
