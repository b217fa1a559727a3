"""What heads of decoder layers share: the layers' pieces from stored weights, and their keys and values over slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specwire.core.model import Feed
from specwire.lm.runners.decoder import (
    AttentionBatch,
    DecoderLayers,
    DecoderShape,
    Layout,
    Model,
    batch_of,
)
from specwire.lm.runners.linear import pack_rounded


class HeadLayers(DecoderLayers):
    """Layers that read a state beside each token's embedding. Large ones are in 8 bits: guesses need not be exact."""

    def __init__(self, shape: DecoderShape, model: Model, cache: torch.Tensor) -> None:
        super().__init__(shape, model, cache, packing=pack_rounded)

    def _last(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Of x (rows, hidden) the last row of each feed."""
        rows: list[torch.Tensor] = []
        end = 0
        for count in counts:
            end += count
            rows.append(x.narrow(0, end - 1, 1))
        return torch.cat(rows)


Rows = tuple[list[int], list[int], list[int], list[int], AttentionBatch]


class HeadCache:
    """Keys and values of a head's layers, (layers, slots, 2 kv_heads, context, head_dim)."""

    most_depth: int | None = None

    def __init__(
        self, shape: DecoderShape, slots: int, context: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        size = (shape.layers, slots, 2 * shape.kv_heads, context, shape.head_dim)
        self.cache = torch.zeros(size, dtype=dtype, device=device)
        group = shape.heads // shape.kv_heads
        self._layout = Layout(2 * shape.kv_heads, context, group, dtype, self.cache.device)

    def rows(self, feeds: Sequence[Feed]) -> Rows:
        """tokens, slots, starts, counts and batch of `runners.decoder.Decoder`."""
        return (
            [token for feed in feeds for token in feed.tokens],
            [feed.slot for feed in feeds],
            [feed.start for feed in feeds],
            [len(feed.tokens) for feed in feeds],
            batch_of(feeds, self._layout),
        )

    def zero(self, slot: int, stop: int) -> None:
        self.cache[:, slot, :, :stop].zero_()

    def copy(self, source: int, target: int, stop: int) -> None:
        self.cache[:, target, :, :stop].copy_(self.cache[:, source, :, :stop])

    @property
    def kv_bytes(self) -> int:
        return self.cache.nbytes


def rotations(context: int, head_dim: int, turned: int, theta: float) -> torch.Tensor:
    """Rotation cos + i sin of every position, complex64 (context, head_dim / 2), of which `turned` / 2 are not 1."""
    half = turned // 2
    angles = torch.arange(context)[:, None] * theta ** (-torch.arange(half, dtype=torch.float32) / half)
    still = torch.zeros(context, head_dim // 2 - half)
    angles = torch.cat((angles, still), -1)
    return torch.complex(angles.cos(), angles.sin())
