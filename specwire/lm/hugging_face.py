"""The generic path: any Hugging Face causal model, unchanged, over our slot cache.

A custom `Cache` receives each layer's keys and values, files them under (slot, position), and hands back what the
batch's slots hold. Ragged feeds are right-aligned, so that the rows wanted are the last columns; padding is never
written.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from specwire.lm.interface import Feed


class Batch(NamedTuple):
    """Index tensors of one ragged forward, B feeds padded to M columns over L positions."""

    slots: torch.Tensor  # (B,)
    tokens: torch.Tensor  # (B, M)
    positions: torch.Tensor  # (B, M); 0 for padding
    rows: torch.Tensor  # (tokens fed,): feed of each token
    columns: torch.Tensor  # (tokens fed,): its column
    length: int  # L

    @classmethod
    def of(cls, feeds: Sequence[Feed], device: torch.device) -> Batch:
        width = max(len(feed.tokens) for feed in feeds)
        tokens = [[0] * (width - len(feed.tokens)) + list(feed.tokens) for feed in feeds]
        positions = [[0] * (width - len(feed.tokens)) + list(range(feed.start, feed.stop)) for feed in feeds]
        cells = [(row, column) for row, feed in enumerate(feeds) for column in range(width - len(feed.tokens), width)]
        rows, columns = zip(*cells, strict=True)
        return cls(
            torch.tensor([feed.slot for feed in feeds], device=device),
            torch.tensor(tokens, device=device),
            torch.tensor(positions, device=device),
            torch.tensor(rows, device=device),
            torch.tensor(columns, device=device),
            max(feed.stop for feed in feeds),
        )

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """Additive (B, 1, M, L): position p sees [0, p]. Padding sees position 0, so that its rows stay finite."""
        keys = torch.arange(self.length, device=self.positions.device)
        hidden = keys > self.positions.unsqueeze(-1)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return mask.masked_fill_(hidden, torch.finfo(dtype).min).unsqueeze(1)


class SlotCache(Cache):
    """Keys and values by layer, (slots, heads, context, head_dim), allocated and zeroed when a layer is first seen."""

    def __init__(self, slots: int, context: int) -> None:
        # Without Cache.__init__, whose layers grow, are cropped from the end and know one length for all rows.
        self.layers = []
        self.batch: Batch | None = None
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
        store[self.batch.slots[rows], :, self.batch.positions[rows, columns]] = states[rows, :, columns]
        return store[:, :, : self.batch.length][self.batch.slots]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.batch is None else self.batch.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    @property
    def is_compileable(self) -> bool:
        return False

    def zero(self, slot: int, stop: int) -> None:
        for store in self._stores():
            store[slot, :, :stop].zero_()

    def copy(self, source: int, target: int, stop: int) -> None:
        for store in self._stores():
            store[target, :, :stop].copy_(store[source, :, :stop])

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._stores())

    def _stores(self) -> list[torch.Tensor]:
        return [*self._keys.values(), *self._values.values()]


class HuggingFaceRunner:
    """`Runner` around an `AutoModelForCausalLM`."""

    def __init__(self, model: PreTrainedModel, slots: int, context: int) -> None:
        self._model = model
        self._cache = SlotCache(slots, context)
        first = next(model.parameters())
        self._dtype, self._device = first.dtype, first.device
        self._keeps_last = "logits_to_keep" in inspect.signature(model.forward).parameters

    def zero(self, slot: int, stop: int) -> None:
        self._cache.zero(slot, stop)

    def copy(self, source: int, target: int, stop: int) -> None:
        self._cache.copy(source, target, stop)

    @property
    def kv_bytes(self) -> int:
        """Of the layers seen: all of them once a forward has run."""
        return self._cache.nbytes

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        batch = self._cache.batch = Batch.of(feeds, self._device)
        kept = max(1, *(feed.wanted for feed in feeds), 1)
        options = {"logits_to_keep": kept} if self._keeps_last else {}
        try:
            output = self._model(
                input_ids=batch.tokens,
                attention_mask=batch.mask(self._dtype),
                position_ids=batch.positions,
                past_key_values=self._cache,
                use_cache=True,
                **options,
            )
        finally:
            self._cache.batch = None
        return torch.cat([logits[-max(feed.wanted, 1) :] for feed, logits in zip(feeds, output.logits, strict=True)])
