"""CachedLM: a causal model over a preallocated slot cache, written and masked by absolute position."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch

from specwire.lm.interface import Feed, ModelInfo
from specwire.lm.slots import SlotTable


class Runner(Protocol):
    """Computes forwards over a slot cache of its own. Knows nothing of valid lengths: feeds say all."""

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Logits (sum of max(wanted, 1), at least vocabulary) in the order of the feeds, of any dtype.

        Writes keys and values of each feed at its positions and nowhere else, and attends to positions [0, p] of its
        slot alone.
        """
        ...

    def zero(self, slot: int, stop: int) -> None:
        """Zero keys and values of positions [0, stop) of a slot."""
        ...

    def copy(self, source: int, target: int, stop: int) -> None:
        """Copy keys and values of positions [0, stop), of more where that is cheaper, from one slot to another."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Memory of the slot cache."""
        ...


class CachedLM:
    """A `LanguageModel` on a `Runner`."""

    def __init__(self, runner: Runner, info: ModelInfo, slots: int, unassigned: Sequence[int] = ()) -> None:
        """`unassigned` are ids below info.vocabulary that no token has: their logits are masked."""
        self.info = info
        self.failed: frozenset[int] = frozenset()
        self.runner = runner
        self._table = SlotTable(slots, info.context, info.vocabulary)
        self._unassigned = torch.tensor(unassigned, dtype=torch.long, device=info.device) if unassigned else None

    @property
    def slots(self) -> int:
        return len(self._table)

    def cached(self, slot: int) -> int:
        return self._table.cached(slot)

    def rollback(self, slot: int, length: int) -> None:
        self._table.rollback(slot, length)

    @torch.inference_mode()
    def discard(self, slot: int) -> None:
        self.runner.zero(slot, self._table.written(slot))
        self._table.clear(slot)

    @property
    def kv_bytes(self) -> int:
        return self.runner.kv_bytes

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        self._table.copy(source, target, length)
        self.runner.copy(source, target, length)

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        self._table.check(feeds)
        self.failed = frozenset()
        self._table.write(feeds)
        rows = self.runner.run(feeds)[:, : self.info.vocabulary].float()
        self._table.commit(feeds)
        if not _all_finite(rows):
            self._contain(feeds, rows)
        if self._unassigned is not None:
            rows.index_fill_(1, self._unassigned, -torch.inf)
        return _drop_unwanted(feeds, rows)

    def _contain(self, feeds: Sequence[Feed], rows: torch.Tensor) -> None:
        """Discard the slots whose rows are not finite: a NaN left behind poisons attention even where it is masked."""
        broken = rows.isfinite().all(dim=1).logical_not_().tolist()
        counts = [max(feed.wanted, 1) for feed in feeds]
        ends = list(accumulate(counts))
        self.failed = frozenset(
            feed.slot for feed, end, count in zip(feeds, ends, counts, strict=True) if any(broken[end - count : end])
        )
        for slot in self.failed:
            self.discard(slot)


def _all_finite(rows: torch.Tensor) -> bool:
    """Whether no element is infinite or NaN. A finite sum proves it in one cheap pass; sums can also overflow."""
    return bool(torch.isfinite(rows.sum())) or bool(torch.isfinite(rows).all())


def _drop_unwanted(feeds: Sequence[Feed], rows: torch.Tensor) -> torch.Tensor:
    """Remove the rows that runners compute for feeds that want none (their finiteness is the slot's)."""
    if all(feed.wanted for feed in feeds):
        return rows
    keep = [bool(feed.wanted) for feed in feeds for _ in range(max(feed.wanted, 1))]
    return rows[torch.tensor(keep, device=rows.device)]
