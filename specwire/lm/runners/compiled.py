"""A decoder of the Llama family in a few static shapes, for `torch.compile`, which makes a GPU's step short.

At batch 1 launching a forward's kernels takes longer than running them. A compiled graph, replayed as one CUDA graph,
is launched once. That needs fixed shapes, so feeds are padded to the next of a few *buckets* of (sessions, positions of
each, positions attended to); padding is written to a slot of its own. Feeds that fit no bucket, such as a long prompt's
chunk, run uncompiled, one at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from specwire.core.model import Feed
from specwire.lm.kv_cache import LineRunner
from specwire.lm.runners.decoder import DecoderShape, Layer, Model
from specwire.lm.runners.linear import LinearWeights
from specwire.lm.runners.llama import model_of, shape_of

# Positions of a session in one forward; windows are of up to 16 draft tokens, and a trial at load of 20.
COLUMNS = (1, 4, 8, 32)
# Positions of a slot, and those attended to, are a multiple of this: GPUs' kernels for attention with a mask want it.
ALIGNED_CELLS = 8
# The least sizes, beside one session and all, of sessions and of positions attended to, and how many times as large the
# next size is: every layer copies what is attended to, for as many sessions as the bucket has.
FEW_ROWS, FEW_POSITIONS, GROWTH = 8, 512, 4
# Calls of a bucket before it is used: compile, let PyTorch record a CUDA graph, replay it.
WARM_UPS = 3
# Buckets of all models of the process; PyTorch's own limit is meant for unforeseen shapes.
MOST_GRAPHS = 1024
BACKEND = "inductor"


class Bucket(NamedTuple):
    """rows: sessions; columns: positions of each that are fed; span: positions of each that are attended to."""

    rows: int
    columns: int
    span: int


class Buckets(NamedTuple):
    """The shapes that are compiled: every combination of these sizes. The last of rows is every slot."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    spans: tuple[int, ...]

    @classmethod
    def usual(cls, slots: int, context: int) -> Buckets:
        rows = tuple(sorted({1, *_sizes(FEW_ROWS, slots)}))
        return cls(rows, tuple(columns for columns in COLUMNS if columns <= context), _sizes(FEW_POSITIONS, context))

    def fit(self, feeds: Sequence[Feed]) -> Bucket | None:
        """The least bucket that takes these feeds; None if none does."""
        columns = max(len(feed.tokens) for feed in feeds)
        wanted = (len(feeds), columns, max(feed.stop for feed in feeds))
        found = [next((size for size in sizes if size >= least), 0) for sizes, least in zip(self, wanted, strict=True)]
        return Bucket(*found) if all(found) else None

    def all(self) -> list[Bucket]:
        return [Bucket(*sizes) for sizes in product(*self)]


def _sizes(least: int, most: int) -> tuple[int, ...]:
    """Sizes from `least` to `most`, which is one of them; none is more than half of the next."""
    sizes = []
    while 2 * least <= most:
        sizes.append(least)
        least *= GROWTH
    return (*sizes, most)


class StaticLinear(nn.Module):
    """x -> x @ weight.T + bias. Buffers, so that a CUDA graph reads them where they lie."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weights: LinearWeights) -> None:
        super().__init__()
        self.register_buffer("weight", weights.weight)
        self.register_buffer("bias", weights.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


class CacheCells(NamedTuple):
    """The tensors that every layer of a forward needs; B sessions, M positions of each, L attended to.

    places: (B x M,) where each key goes in the cache; slots: (B,); cos, sin: (B x M, 1, head_dim / 2); mask: additive
    (B, 1, M x group, L).
    """

    places: torch.Tensor
    slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    mask: torch.Tensor


class StaticLayer(nn.Module):
    """One layer and its keys and values: `cache` (slots x context, 2 kv_heads, head_dim)."""

    cache: torch.Tensor
    attention_norm: torch.Tensor
    head_norm: torch.Tensor | None
    mlp_norm: torch.Tensor

    def __init__(self, shape: DecoderShape, layer: Layer, slots: int, context: int) -> None:
        super().__init__()
        self.shape, self.slots, self.context = shape, slots, context
        self.register_buffer("attention_norm", layer.attention_norm)
        self.register_buffer("head_norm", layer.head_norm)
        self.register_buffer("mlp_norm", layer.mlp_norm)
        self.qkv, self.output = StaticLinear(layer.qkv), StaticLinear(layer.output)
        self.gate_up, self.down = StaticLinear(layer.gate_up), StaticLinear(layer.down)
        size = (slots * context, 2 * shape.kv_heads, shape.head_dim)
        self.register_buffer("cache", layer.attention_norm.new_zeros(size))

    def forward(self, x: torch.Tensor, where: CacheCells) -> torch.Tensor:
        """Map x (B x M, hidden) to the same; file its keys and values."""
        x = x + self.output(self._attended(self.qkv(self._normed(x, self.attention_norm)), where))
        gate, up = self.gate_up(self._normed(x, self.mlp_norm)).chunk(2, dim=-1)
        fed: torch.Tensor = self.down(functional.silu(gate) * up)
        return x + fed

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, [x.shape[-1]], weight, self.shape.epsilon)

    def _attended(self, qkv: torch.Tensor, where: CacheCells) -> torch.Tensor:
        """Queries that share a key head are rows of one attention, as in `specwire.lm.runners.decoder`."""
        heads, kv_heads, dim = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        every = qkv.view(-1, heads + 2 * kv_heads, dim)
        turned = self._rotated(every[:, : heads + kv_heads], where)
        self.cache.index_copy_(0, where.places, torch.cat((turned[:, heads:], every[:, heads + kv_heads :]), dim=1))
        rows, span = where.slots.shape[0], where.mask.shape[-1]
        seen = self.cache.view(self.slots, self.context, 2 * kv_heads, dim)[:, :span].index_select(0, where.slots)
        keys, values = seen.transpose(1, 2).chunk(2, dim=1)
        query = turned[:, :heads].reshape(rows, -1, kv_heads, heads // kv_heads, dim).transpose(1, 2)
        query = query.reshape(rows, kv_heads, -1, dim)
        result = functional.scaled_dot_product_attention(query, keys, values, where.mask)
        result = result.view(rows, kv_heads, -1, heads // kv_heads, dim).transpose(1, 2)
        return result.reshape(-1, heads * dim)

    def _rotated(self, heads: torch.Tensor, where: CacheCells) -> torch.Tensor:
        """Turn (rows, heads, head_dim) in float32; dimensions that turn together lie side by side."""
        if self.head_norm is not None:
            heads = functional.rms_norm(heads, [heads.shape[-1]], None, self.shape.epsilon) * self.head_norm
        first, second = heads.float().unflatten(-1, (-1, 2)).unbind(-1)
        pairs = (first * where.cos - second * where.sin, first * where.sin + second * where.cos)
        return torch.stack(pairs, dim=-1).flatten(-2).to(heads.dtype)


class StaticDecoder(nn.Module):
    """The whole forward for one bucket."""

    embedding: torch.Tensor
    norm: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, shape: DecoderShape, model: Model, slots: int, context: int, taps: Sequence[int] = ()) -> None:
        """taps: as `specwire.lm.runners.decoder.Decoder`."""
        super().__init__()
        self.shape, self.taps = shape, tuple(taps)
        self.register_buffer("embedding", model.embedding)
        self.register_buffer("norm", model.norm)
        self.register_buffer("cos", model.rotations.real.contiguous())
        self.register_buffer("sin", model.rotations.imag.contiguous())
        self.layers = nn.ModuleList(StaticLayer(shape, layer, slots, context) for layer in model.layers)
        self.head = StaticLinear(model.head)

    def forward(self, fed: torch.Tensor, span: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits (B x M, vocabulary) in the model's dtype; `fed`: see `packed`.

        And the residual streams that are tapped, side by side (B x M, taps x hidden); None where none is.
        """
        tokens, positions, places, slots = fed.unbind(0)
        where = CacheCells(
            places.flatten(),
            slots[:, 0],
            self.cos[positions.flatten()].unsqueeze(1),
            self.sin[positions.flatten()].unsqueeze(1),
            self._mask(positions, span),
        )
        x = functional.embedding(tokens.flatten(), self.embedding)
        streams: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in self.taps:
                streams[index] = x
            x = layer(x, where)
        streams[len(self.layers)] = x
        logits: torch.Tensor = self.head(functional.rms_norm(x, [x.shape[-1]], self.norm, self.shape.epsilon))
        return logits, torch.cat([streams[tap] for tap in self.taps], dim=-1) if self.taps else None

    def _mask(self, positions: torch.Tensor, span: int) -> torch.Tensor:
        """Additive (B, 1, M x group, L): position p sees [0, p]."""
        hidden = torch.arange(span, device=positions.device) > positions.unsqueeze(-1)
        mask = torch.zeros(hidden.shape, dtype=self.embedding.dtype, device=positions.device)
        mask = mask.masked_fill(hidden, float("-inf"))
        return mask.repeat_interleave(self.shape.heads // self.shape.kv_heads, dim=1).unsqueeze(1)


def packed(feeds: Sequence[Feed], bucket: Bucket, context: int, spare: int) -> list[list[list[int]]]:
    """Integers (4, rows, columns): token, position, place in the cache, and slot, of every position fed.

    Feeds are filled up at the end of each and behind the last, with the first position of the slot `spare`.
    """
    filling = [[0, 0, spare * context]] * bucket.columns
    rows = []
    for feed in [*feeds, *[None] * (bucket.rows - len(feeds))]:
        cells = [] if feed is None else _cells(feed, context)
        slot = spare if feed is None else feed.slot
        rows.append([[*cell, slot] for cell in [*cells, *filling[len(cells) :]]])
    return [[[cell[kind] for cell in row] for row in rows] for kind in range(4)]


def _cells(feed: Feed, context: int) -> list[list[int]]:
    return [[token, feed.start + at, feed.slot * context + feed.start + at] for at, token in enumerate(feed.tokens)]


def mode_for(device: torch.device, backend: str) -> str | None:
    """The mode of torch.compile: "reduce-overhead" adds CUDA graphs; only the default backend has modes."""
    return "reduce-overhead" if device.type == "cuda" and backend == BACKEND else None


def _by_slot(feeds: Sequence[Feed], rows: torch.Tensor, counts: list[int]) -> dict[int, torch.Tensor]:
    return {feed.slot: part for feed, part in zip(feeds, rows.split(counts), strict=True)}


def _aligned(positions: int) -> int:
    return -(-positions // ALIGNED_CELLS) * ALIGNED_CELLS


class CompiledRunner(LineRunner):
    """`Runner` with weights from a Hugging Face model of the Llama family, compiled for `buckets`."""

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        context: int,
        vocabulary: int,
        buckets: Buckets | None = None,
        backend: str | None = None,
        taps: Sequence[int] = (),
    ) -> None:
        """Compile, which takes some ten seconds for each bucket. Raises Unsuited as `LlamaRunner` does.

        taps: as `specwire.lm.runners.decoder.Decoder`.
        """
        shape, backend = shape_of(model), backend or BACKEND
        self.buckets = buckets or Buckets.usual(slots, context)
        self._room, self._spare = _aligned(context), slots
        weights = model_of(model, shape, context, vocabulary)
        self.decoder = StaticDecoder(shape, weights, slots + 1, self._room, taps).eval()
        self._device = self.decoder.embedding.device
        self.tapped, self.tapping = self.decoder.embedding.new_empty(0), True
        mode = mode_for(self._device, backend)
        self._compiled: Any = torch.compile(self.decoder, backend=backend, mode=mode, dynamic=False, fullgraph=True)
        self._warm_up()

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        rows, tapped = self._run(feeds)
        if tapped is not None:
            self.tapped = tapped
        return rows

    def _run(self, feeds: Sequence[Feed]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of the tokens wanted, and the streams tapped of all tokens."""
        bucket = self.buckets.fit(feeds)
        if bucket is not None:
            return self._compute(feeds, bucket)
        if len(feeds) == 1:
            return self._compute(feeds, Bucket(1, len(feeds[0].tokens), feeds[0].stop), compiled=False)
        wide = [feed for feed in feeds if self.buckets.fit([feed]) is None]
        narrow = [feed for feed in feeds if self.buckets.fit([feed]) is not None]
        rows: dict[int, torch.Tensor] = {}
        streams: dict[int, torch.Tensor] = {}
        for group in [*([narrow] if narrow else []), *([feed] for feed in wide)]:
            logits, tapped = self._run(group)
            rows |= _by_slot(group, logits, [max(feed.wanted, 1) for feed in group])
            if tapped is not None:
                streams |= _by_slot(group, tapped, [len(feed.tokens) for feed in group])
        logits = torch.cat([rows[feed.slot] for feed in feeds])
        return logits, torch.cat([streams[feed.slot] for feed in feeds]) if streams else None

    def zero(self, slot: int, stop: int) -> None:
        for cache in self._caches():
            cache[slot, :stop].zero_()

    def copy(self, source: int, target: int, stop: int) -> None:
        for cache in self._caches():
            cache[target, :stop].copy_(cache[source, :stop])

    @property
    def kv_bytes(self) -> int:
        return sum(cache.nbytes for cache in self._caches())

    def _caches(self) -> Iterator[torch.Tensor]:
        """Each layer's cache, (slots, context, 2 kv_heads, head_dim)."""
        for layer in self.decoder.layers:
            yield layer.get_buffer("cache").unflatten(0, (-1, self._room))

    def _compute(
        self, feeds: Sequence[Feed], bucket: Bucket, compiled: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What is returned are copies: the next replay of a CUDA graph writes where this one has."""
        fed = torch.tensor(packed(feeds, bucket, self._room, self._spare)).to(self._device)
        if compiled:
            torch.compiler.cudagraph_mark_step_begin()
        logits, tapped = (self._compiled if compiled else self.decoder)(fed, _aligned(bucket.span))
        wanted = self._last(feeds, bucket, [max(feed.wanted, 1) for feed in feeds])
        if tapped is None or not self.tapping:
            return logits[wanted], None
        return logits[wanted], tapped[self._last(feeds, bucket, [len(feed.tokens) for feed in feeds])]

    def _last(self, feeds: Sequence[Feed], bucket: Bucket, counts: Sequence[int]) -> torch.Tensor:
        """Rows of the forward that are of the last so many tokens of each feed."""
        rows = [
            row * bucket.columns + column
            for row, (feed, count) in enumerate(zip(feeds, counts, strict=True))
            for column in range(len(feed.tokens) - count, len(feed.tokens))
        ]
        return torch.tensor(rows, dtype=torch.long, device=self._device)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Every bucket, of padding only; widest first, for the memory that they share."""
        limits = torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS, accumulated_recompile_limit=MOST_GRAPHS)
        with limits, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of PyTorch, by what its compiler imports
            for bucket in reversed(self.buckets.all()):
                for _ in range(WARM_UPS):
                    self._compute([], bucket)
