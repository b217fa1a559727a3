"""The generic path: any Hugging Face causal model, unchanged, over our slot cache.

A custom `Cache` receives each layer's keys and values, files them under (slot, position), and hands back what the
batch's slots hold. Ragged feeds are right-aligned, so that the rows wanted are the last columns; padding is never
written.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from specwire.core.model import Feed
from specwire.lm.kv_cache import Runner, StoredSlots
from specwire.lm.model_config import CHUNKED_ATTENTION, FULL_ATTENTION, AttentionWindow

# A feed of more tokens than this, which is a part of a prompt, is computed by itself: padding every other one to its
# width would make a step of many sessions as many times as long.
MOST_TOGETHER = 32


def together(feeds: Sequence[Feed]) -> list[list[Feed]]:
    """Groups of feeds, each computed by one forward."""
    narrow = [feed for feed in feeds if len(feed.tokens) <= MOST_TOGETHER]
    wide = [[feed] for feed in feeds if len(feed.tokens) > MOST_TOGETHER]
    return [narrow, *wide] if narrow else wide


class PaddedBatch(NamedTuple):
    """Index tensors of one ragged forward, B feeds padded to M columns over L positions."""

    slots: torch.Tensor  # (B,)
    tokens: torch.Tensor  # (B, M)
    positions: torch.Tensor  # (B, M); 0 for padding
    places: torch.Tensor  # (B, M): row of the slot
    last: torch.Tensor  # (B, M): last of the rows from 0 on that a token sees
    seen: Sequence[tuple[int, int]]  # beyond those: cells of (B, M, L), and by how many positions each lies before
    rows: torch.Tensor  # (tokens fed,): feed of each token
    columns: torch.Tensor  # (tokens fed,): its column
    length: int  # L
    start: int  # position of the first token of the only feed, where there is one

    @classmethod
    def of(cls, feeds: Sequence[Feed], device: torch.device) -> PaddedBatch:
        width, length = max(len(feed.tokens) for feed in feeds), max(feed.stop for feed in feeds)

        def padded(numbers: Iterable[Sequence[int]]) -> torch.Tensor:
            return torch.tensor([[0] * (width - len(each)) + list(each) for each in numbers], device=device)

        cells = [(row, column) for row, feed in enumerate(feeds) for column in range(width - len(feed.tokens), width)]
        rows, columns = zip(*cells, strict=True)
        positions = padded(feed.positions for feed in feeds)
        places, last = positions, positions
        seen: list[tuple[int, int]] = []
        if any(feed.tree for feed in feeds):
            places, last = padded(range(feed.start, feed.stop) for feed in feeds), padded(map(_shown, feeds))
            first = [row * width + width - len(feed.tokens) for row, feed in enumerate(feeds)]
            seen = [cell for feed, at in zip(feeds, first, strict=True) for cell in _ancestors(feed, at, length)]
        return cls(
            torch.tensor([feed.slot for feed in feeds], device=device),
            padded(feed.tokens for feed in feeds),
            positions,
            places,
            last,
            seen,
            torch.tensor(rows, device=device),
            torch.tensor(columns, device=device),
            length,
            feeds[0].start,
        )

    def mask(self, dtype: torch.dtype, window: AttentionWindow | None = None) -> torch.Tensor:
        """Additive (B, 1, M, L): position p sees [0, p], or its window. Padding sees position 0: finite rows."""
        keys = torch.arange(self.length, device=self.positions.device)
        hidden, reach = keys > self.last.unsqueeze(-1), self._reach(window)
        if reach is not None:
            hidden = hidden | (keys <= (self.positions - reach).unsqueeze(-1))
        if self.seen:
            far = None if reach is None else reach.flatten().tolist()
            near = [at for at, distance in self.seen if far is None or distance < far[at // self.length]]
            hidden.view(-1).index_fill_(0, torch.tensor(near, device=hidden.device), False)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return mask.masked_fill_(hidden, torch.finfo(dtype).min).unsqueeze(1)

    def _reach(self, window: AttentionWindow | None) -> torch.Tensor | None:
        """(B, M): how many positions each token sees, its own the last; None for all."""
        if window is None:
            return None
        if window.kind == CHUNKED_ATTENTION:
            return self.positions % window.size + 1
        return torch.full_like(self.positions, window.size)


def _shown(feed: Feed) -> Sequence[int]:
    """Last of the rows from 0 on that each token sees."""
    return [feed.tree.trunk - 1] * len(feed.tokens) if feed.tree else feed.positions


def _ancestors(feed: Feed, first: int, length: int) -> Iterator[tuple[int, int]]:
    """Of the tokens of a tree, which are rows of a mask from `first` on: see `PaddedBatch.seen`."""
    for index, ancestors in enumerate(feed.tree.ancestors if feed.tree else ()):
        begin = (first + index) * length
        nearest = (feed.start + index, *reversed(ancestors))
        yield from ((begin + row, distance) for distance, row in enumerate(nearest))


class SlotCache(Cache):
    """Keys and values by layer, (slots, heads, context, head_dim), allocated and zeroed when a layer is first seen.

    alone: forwards are of one feed each, of which a model may ask how much came before it.
    """

    def __init__(self, slots: int, context: int) -> None:
        # Without Cache.__init__, whose layers grow, are cropped from the end and know one length for all rows.
        self.layers = []
        self.batch: PaddedBatch | None = None
        self.alone = False
        self._size = (slots, context)
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_args: Any,
        **_options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, heads, M, head_dim) in; (B, heads, L, head_dim) of the batch's slots out."""
        return self._file(self._keys, layer_idx, key_states), self._file(self._values, layer_idx, value_states)

    def _file(self, stores: dict[int, torch.Tensor], layer: int, states: torch.Tensor) -> torch.Tensor:
        if self.batch is None:
            raise RuntimeError("the cache was used outside a forward")
        rows, columns = self.batch.rows, self.batch.columns
        if layer not in stores:
            stores[layer] = states.new_zeros(self._size[0], states.shape[1], self._size[1], states.shape[3])
        store = stores[layer]
        store[self.batch.slots[rows], :, self.batch.places[rows, columns]] = states[rows, :, columns]
        return store[:, :, : self.batch.length][self.batch.slots]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if self.batch is None:
            return 0
        return self.batch.start if self.alone else self.batch.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return 0 if self.batch is None else self.batch.length, 0

    @property
    def is_compileable(self) -> bool:
        return False

    def zero(self, slot: int, stop: int) -> None:
        for store in self.stores():
            store[slot, :, :stop].zero_()

    def copy(self, source: int, target: int, stop: int) -> None:
        for store in self.stores():
            store[target, :, :stop].copy_(store[source, :, :stop])

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        for store in self.stores():
            kept = store[slot].index_select(1, torch.tensor(rows, device=store.device))
            store[slot, :, start : start + len(rows)] = kept

    @property
    def kv_bytes(self) -> int:
        """Bytes of the layers seen so far, which are all of them once a forward has run."""
        return sum(store.nbytes for store in self.stores())

    def stores(self) -> list[torch.Tensor]:
        return [*self._keys.values(), *self._values.values()]


class HuggingFaceRunner(StoredSlots, Runner):
    """`Runner` around an `AutoModelForCausalLM`."""

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        context: int,
        window: AttentionWindow | None = None,
        alone: bool = False,
    ) -> None:
        """alone: one feed at a time, without a mask, for models that derive positions from a mask (ALiBi).

        These take no trees; nor do models that a trial with one finds to take positions from elsewhere than the ids
        that they are given (`specwire.lm.runners.select`).
        """
        self.branches = not alone
        self._model = model
        self._window = window
        self.cache = self.store = SlotCache(slots, context)
        self.cache.alone = alone
        first = next(model.parameters())
        self._dtype, self._device = first.dtype, first.device
        self._keeps_last = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def alone(self) -> bool:
        return self.cache.alone

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        rows: dict[int, torch.Tensor] = {}
        for group in [[feed] for feed in feeds] if self.alone else together(feeds):
            rows.update(zip((feed.slot for feed in group), self._rows(group), strict=True))
        return torch.cat([rows[feed.slot] for feed in feeds])

    def _rows(self, feeds: Sequence[Feed]) -> Iterator[torch.Tensor]:
        batch = self.cache.batch = PaddedBatch.of(feeds, self._device)
        kept = max(1, *(feed.wanted for feed in feeds), 1)
        options = {"logits_to_keep": kept} if self._keeps_last else {}
        try:
            output = self._model(
                input_ids=batch.tokens,
                attention_mask=None if self.alone else self._mask(batch),
                position_ids=batch.positions,
                past_key_values=self.cache,
                use_cache=True,
                **options,
            )
        finally:
            self.cache.batch = None
        return (logits[-max(feed.wanted, 1) :] for feed, logits in zip(feeds, output.logits, strict=True))

    def _mask(self, batch: PaddedBatch) -> torch.Tensor | dict[str, torch.Tensor]:
        """One mask for all layers, or one for each kind of layer."""
        if self._window is None:
            return batch.mask(self._dtype)
        windowed = batch.mask(self._dtype, self._window)
        if not self._window.mixed:
            return windowed
        return {FULL_ATTENTION: batch.mask(self._dtype), self._window.kind: windowed}
