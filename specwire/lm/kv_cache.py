"""The slot cache by absolute position: what a runner computes, what a model is to the services, and CachedLM."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch

from specwire.core.messages import MOST_WINDOW
from specwire.core.model import Feed, ModelInfo, SlotModel, SlotTable


class Sizes(NamedTuple):
    """What a runner's cache is for."""

    slots: int
    context: int
    vocabulary: int


class Runner(ABC):
    """Computes forwards over a slot cache of its own. It keeps no valid lengths: feeds say everything.

    branches: whether feeds may have a tree. alike: whether rows of windows are computed as steps of one token are, at
    any length of a text; invariant: a trial found, too, that they have the same bits, whoever shares the forward.
    layers: of one that can leave some out, else 0. taps: of what enters these layers it tells the residual streams;
    none for one that tells nothing. tapped: those of the last run (sum of tokens, taps x hidden). tapping: whether the
    next runs tell them; rows are the same without.
    """

    branches = False
    alike = False
    invariant = False
    layers = 0
    taps: Sequence[int] = ()
    tapped: torch.Tensor
    tapping = True

    @abstractmethod
    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Logits (sum of max(wanted, 1), at least vocabulary) in the order of the feeds, of any dtype.

        Writes keys and values of each feed at its rows and nowhere else, and attends to positions [0, p] of its slot
        alone, or to what its tree lets it see.
        """

    def skim(self, feeds: Sequence[Feed], kept: Sequence[int]) -> torch.Tensor:
        """`run` by the layers `kept` alone, which rise, and their keys and values."""
        raise NotImplementedError(f"{type(self).__name__} can leave no layers out")

    def zero_rows(self, slot: int, start: int, stop: int) -> None:
        """Zero what was written by `skim`."""
        raise NotImplementedError(f"{type(self).__name__} can leave no layers out")

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """Copy keys and values of `rows`, which rise and lie at or behind `start`, to start, start + 1, ...

        Asked of those that branch.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no trees: rows {[*rows]} of slot {slot} stay")

    @abstractmethod
    def zero(self, slot: int, stop: int) -> None:
        """Zero keys and values of positions [0, stop) of a slot."""

    @abstractmethod
    def copy(self, source: int, target: int, stop: int) -> None:
        """Copy keys and values of positions [0, stop), of more where that is cheaper, from one slot to another."""

    @property
    @abstractmethod
    def kv_bytes(self) -> int:
        """Memory of the slot cache."""

    @property
    def most_window(self) -> int:
        """See `SlotModel`."""
        return MOST_WINDOW

    @property
    def state_bytes(self) -> int:
        """See `SlotModel`."""
        return 0


class LanguageModel(SlotModel, Protocol):
    """A causal language model whose rows are logits."""

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Feed tokens of several slots in one pass.

        Returns:
            float32 logits (sum of wanted, vocabulary) on the model's device, in the order of the feeds. The next
            forward may overwrite them.

        Raises:
            ValueError: a feed is invalid; nothing was fed.
        """
        ...


class CachedLM:
    """A `LanguageModel` on a `Runner`."""

    def __init__(self, runner: Runner, info: ModelInfo, slots: int, unassigned: Sequence[int] = ()) -> None:
        """unassigned: ids below info.vocabulary that no token has: their logits are masked."""
        self.info = replace(info, deterministic=runner.invariant)
        self.failed: frozenset[int] = frozenset()
        self.runner = runner
        self._table = SlotTable(slots, info.context, info.vocabulary, runner.branches)
        self._unassigned = torch.tensor(unassigned, dtype=torch.long, device=info.device)

    @property
    def slots(self) -> int:
        return len(self._table)

    def cached(self, slot: int) -> int:
        return self._table.cached(slot)

    def rollback(self, slot: int, length: int) -> None:
        self._table.rollback(slot, length)

    @property
    def branches(self) -> bool:
        return self._table.branches

    @torch.inference_mode()
    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        self._table.keep(slot, start, rows)
        # Most often some lie where they should.
        moved = next((at for at, row in enumerate(rows) if row != start + at), len(rows))
        if moved < len(rows):
            self.runner.keep(slot, start + moved, rows[moved:])

    def written(self, slot: int) -> int:
        """See `SlotTable`."""
        return self._table.written(slot)

    @torch.inference_mode()
    def discard(self, slot: int) -> None:
        self.runner.zero(slot, self._table.written(slot))
        self._table.clear(slot)

    @property
    def most_window(self) -> int:
        return self.runner.most_window

    @property
    def kv_bytes(self) -> int:
        return self.runner.kv_bytes

    @property
    def state_bytes(self) -> int:
        return self.runner.state_bytes

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        self._table.copy(source, target, length)
        self.runner.copy(source, target, length)

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        self._table.check(feeds)
        self.failed = frozenset()
        self._table.write(feeds)
        raw = self.runner.run([_straight(feed) for feed in feeds])
        self._table.commit(feeds)
        rows, finite = logits_of(raw, self.info.vocabulary, self._unassigned)
        if not finite:
            self._contain(feeds, rows)
            rows.index_fill_(1, self._unassigned, -torch.inf)
        return _drop_unwanted(feeds, rows)

    @torch.inference_mode()
    def skim(self, feeds: Sequence[Feed], kept: Sequence[int]) -> torch.Tensor:
        """Logits as of `forward`, by some of the layers. What a slot holds stays as it is.

        Feeds begin at the valid length, or behind what was skimmed there before. Their keys and values lie beyond it,
        stale, until a forward writes there: it attends to its own rows only once it has written all layers of them.

        Raises:
            ValueError: a feed is invalid; nothing was written.
            FloatingPointError: logits are not finite; the rows were zeroed, for a NaN poisons attention even where it
                is masked.
        """
        self._table.check(feeds, beyond=True)
        self._table.void(feeds)
        sound = False
        try:
            raw = self.runner.skim([_straight(feed) for feed in feeds], kept)
            rows, sound = logits_of(raw, self.info.vocabulary, self._unassigned)
        finally:
            if not sound:
                for feed in feeds:
                    self.runner.zero_rows(feed.slot, feed.start, feed.stop)
        if not sound:
            raise FloatingPointError(f"logits by the layers {[*kept]} are not finite")
        return _drop_unwanted(feeds, rows)

    def _contain(self, feeds: Sequence[Feed], rows: torch.Tensor) -> None:
        """Discard slots whose rows are not finite: a NaN left behind poisons attention even where it is masked."""
        broken = rows.isfinite().all(dim=1).logical_not_().tolist()
        counts = [max(feed.wanted, 1) for feed in feeds]
        ends = list(accumulate(counts))
        self.failed = frozenset(
            feed.slot for feed, end, count in zip(feeds, ends, counts, strict=True) if any(broken[end - count : end])
        )
        for slot in self.failed:
            self.discard(slot)


def _straight(feed: Feed) -> Feed:
    """Without its tree, if the last token, and so each one, descends from every row before it: lines are faster."""
    tree = feed.tree
    if tree is None or len(tree.ancestors[-1]) < feed.stop - 1 - tree.trunk:
        return feed
    return feed._replace(tree=None)


def logits_of(rows: torch.Tensor, vocabulary: int, unassigned: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Float rows of the ids below `vocabulary`, and whether no element is infinite or NaN; if so, those ids masked.

    A finite sum proves it in one cheap pass; sums can also overflow. Behind a forward on a CPU, whose weights fill the
    caches, NumPy takes a third of PyTorch's time.
    """
    rows = rows[:, :vocabulary].float()
    if rows.device.type == "cpu":
        values = rows.numpy()
        with np.errstate(invalid="ignore", over="ignore"):
            finite = math.isfinite(values.sum()) or bool(np.isfinite(values).all())
    else:
        finite = bool(torch.isfinite(rows.sum())) or bool(torch.isfinite(rows).all())
    if finite and len(unassigned) > 0:
        rows.index_fill_(1, unassigned, -torch.inf)
    return rows, finite


def _drop_unwanted(feeds: Sequence[Feed], rows: torch.Tensor) -> torch.Tensor:
    """Remove the rows that runners compute for feeds that want none (their finiteness is the slot's)."""
    if all(feed.wanted for feed in feeds):
        return rows
    keep = [bool(feed.wanted) for feed in feeds for _ in range(max(feed.wanted, 1))]
    return rows[torch.tensor(keep, device=rows.device)]
