"""The slot cache by absolute position: what a runner computes, what a model is to the services, CachedLM."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from specwire.core.messages import MOST_WINDOW
from specwire.core.model import Feed, ModelError, ModelInfo, SlotModel, SlotTable
from specwire.lm.model_config import ATTENTION, HYBRID, ModelConfig, is_recurrent


class Sizes(NamedTuple):
    """What a runner's cache is for."""

    slots: int
    context: int
    vocabulary: int


class Runner(ABC):
    """Computes forwards over a slot cache of its own. It keeps no valid lengths: feeds say everything.

    branches: whether feeds may have a tree. alike: whether rows of windows are computed as steps of one token are, at
    any length of a text; invariant: a trial found, too, that they have the same bits, whoever shares the forward.
    widest: rows of a text that may be computed as windows are.
    layers: of one that can leave some out, else 0. taps: of what enters these layers it tells the residual streams;
    none for one that tells nothing. tapped: those of the last run (sum of tokens, taps x hidden). tapping: whether the
    next runs tell them; rows are the same without.
    decided_by: what decides which rows it computes and how fast, beside what `specwire.lm.remembered` names, each with
    a `repr` that tells all of it; nothing where that is not known.
    """

    branches = False
    alike = False
    invariant = False
    widest = 1
    layers = 0
    taps: Sequence[int] = ()
    tapped: torch.Tensor
    tapping = True
    decided_by: tuple[object, ...] = ()

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


class StoredSlots:
    """Of a runner, or a head, whose keys and values another has: a cache, pages, or a runner that it feeds."""

    store: Any

    def zero(self, slot: int, stop: int) -> None:
        self.store.zero(slot, stop)

    def copy(self, source: int, target: int, stop: int) -> None:
        self.store.copy(source, target, stop)

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        self.store.keep(slot, start, rows)

    @property
    def kv_bytes(self) -> int:
        return int(self.store.kv_bytes)


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
        try:
            self.runner.copy(source, target, length)
        except (MemoryError, RuntimeError):
            self._table.clear(target)
            raise

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
        finite = all_finite(rows)
    if finite and len(unassigned) > 0:
        rows.index_fill_(1, unassigned, -torch.inf)
    return rows, finite


def all_finite(rows: torch.Tensor) -> bool:
    """A finite sum proves it in one cheap pass; sums can also overflow."""
    return bool(torch.isfinite(rows.sum())) or bool(torch.isfinite(rows).all())


def _drop_unwanted(feeds: Sequence[Feed], rows: torch.Tensor) -> torch.Tensor:
    """Remove the rows that runners compute for feeds that want none (their finiteness is the slot's)."""
    if all(feed.wanted for feed in feeds):
        return rows
    keep = [bool(feed.wanted) for feed in feeds for _ in range(max(feed.wanted, 1))]
    return rows[torch.tensor(keep, device=rows.device)]


# ----------------------------------------------------------------------------------------------------------------------
# Memory of slots: as many as are asked for, or as fit into so many bytes; zeros that take none until they are written.

MOST_SLOTS = 1024
# Of recurrent layers: rows of a feed whose states are kept, which are a window and the token before it. States of a
# slot: those, the one that the feed began with, and a few of the text before.
ROWS, SPREAD = MOST_WINDOW + 1, 6
STATES = ROWS + 1 + SPREAD
# Of include/uapi/asm-generic/mman.h; Python's mmap names it from 3.13 on. Bytes that are worth a call to give back.
NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
WORTH_GIVING = 1 << 20
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


class KvMemory(NamedTuple):
    """Bytes that all slots may take, in place of their number."""

    size: int


def position_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one position of one slot: keys and values of every layer that keeps them. Those that share need less."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    layers = text.num_hidden_layers
    if kinds is not None:
        layers = sum(kind in ATTENTION or kind == HYBRID for kind in kinds)
    if not layers:
        return 0
    if latent := getattr(text, "kv_lora_rank", None):  # what is kept is compressed (arXiv 2405.04434, section 2.1)
        return int(layers * (latent + text.qk_rope_head_dim) * dtype.itemsize)
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int(2 * layers * kv_heads * size * dtype.itemsize)


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """What one slot takes: keys and values of so many `positions` in `dtype`; `beside`: bytes of a head, of states."""

    config: ModelConfig
    positions: int
    dtype: torch.dtype
    beside: int = 0

    @property
    def size(self) -> int:
        """Bytes of all that."""
        return self.positions * position_bytes(self.config, self.dtype) + self.beside

    def slots(self, asked: int | KvMemory) -> int:
        """As many as were asked for, or as fit into the memory; ModelError if not one does."""
        if not isinstance(asked, KvMemory):
            return asked
        whose = "recurrent layers" if is_recurrent(self.config) else "head"
        return slots_of_size(asked.size, self.size, self.positions, self.beside, whose)


def rows_of(states: int) -> int:
    """Rows of a feed whose states are kept, where a slot has so many."""
    return max(1, min(ROWS, states - 1))


def fitting_states(memory: int, keys: int, state: int) -> int:
    """States of a slot: as many as `memory` has room for beside `keys` bytes of keys and values; at least one."""
    return max(1, min(STATES, (memory - keys) // max(1, state)))


def slots_of_size(memory: int, slot: int, context: int, beside: int = 0, whose: str = "head") -> int:
    """Slots of so many bytes each that fit into `memory` bytes; ModelError if not one does.

    context: positions of each. beside: bytes of it that are for `whose`.
    """
    if slot > memory:
        of_head = f", {readable(beside)} of them for its {whose}" if beside else ""
        raise ModelError(
            f"kv_memory: {readable(memory)} are less than the {readable(slot)} that one text of {context} positions "
            f"takes{of_head}; give more, or a shorter context"
        )
    return min(memory // max(1, slot), MOST_SLOTS)


def unused(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take memory as they are written, where the system can tell; MemoryError if there is no such room."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size == 0 or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(*shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"no {readable(size)} can be had: {error}") from error
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(*shape)


def forget(memory: torch.Tensor) -> None:
    """Zero part of an `unused`, which lies in one piece; a large one gives its memory back."""
    flat = memory.view(torch.uint8).view(-1)
    begin = -flat.data_ptr() % mmap.PAGESIZE
    inner = (len(flat) - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if inner < WORTH_GIVING or not hasattr(mmap, "MADV_DONTNEED"):
        flat.zero_()
        return
    address, length = ctypes.c_void_p(flat.data_ptr() + begin), ctypes.c_size_t(inner)
    if ctypes.CDLL(None).madvise(address, length, mmap.MADV_DONTNEED) == 0:
        flat[:begin].zero_()
        flat[begin + inner :].zero_()
    else:
        flat.zero_()


def readable(size: int) -> str:
    """A size for people, such as 1.5 GiB."""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {UNITS[unit]}"
