"""A decoder of the Llama family in a few static shapes, for `torch.compile`, which makes a GPU's step short.

At batch 1 launching a forward's kernels takes longer than running them. A forward that is recorded as one CUDA graph is
launched once. That needs fixed shapes, so feeds are padded to the next of a few *buckets* of (sessions, positions of
each, positions attended to); padding is written to a slot of its own. Feeds that fit no bucket, such as a long prompt's
chunk, run uncompiled, one at a time.

One layer is compiled for each bucket, and all layers run it: a graph of the whole model takes as many times longer to
compile as it has layers. The CUDA graph is recorded around all of them. It may be replayed in any thread; those that
`torch.compile` records itself belong to the thread that made them, and a service loads in another than it computes in.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from specwire.core.model import Feed
from specwire.lm.kv_cache import Runner
from specwire.lm.linear import LinearWeights
from specwire.lm.model_config import CausalModel
from specwire.lm.runners.decoder import DecoderShape, Layer, Model
from specwire.lm.runners.llama import model_of, shape_of

# Positions of a session in one forward; windows are of up to 16 draft tokens, and a trial at load of 20.
COLUMNS = (1, 4, 8, 32)
# Positions of a slot, and those attended to, are a multiple of this: GPUs' kernels for attention with a mask want it.
ALIGNED_CELLS = 8
# The least sizes, beside one session and all, of sessions and of positions attended to, and how many times as large the
# next size is: every layer copies what is attended to, for as many sessions as the bucket has.
FEW_ROWS, FEW_POSITIONS, GROWTH = 8, 512, 4
# Of a session alone, by key head: so many are attended to without a kernel for attention.
FEW_QUERIES = 32
# Calls of a bucket before it is recorded or used: compile, and run what was compiled.
WARM_UPS = 2
# Buckets of all models of the process; PyTorch's own limit is meant for unforeseen shapes.
MOST_GRAPHS = 1024
BACKEND = "inductor"

Backend = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]


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

    places: (B x M,) where each key goes in the cache; slots: (B,), None where each row is the slot of its number; cos,
    sin: (B x M, 1, head_dim / 2); mask: additive (B, 1, M x group, L).
    """

    places: torch.Tensor
    slots: torch.Tensor | None
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
        rows, span = where.mask.shape[0], where.mask.shape[-1]
        cells = self.cache.view(self.slots, self.context, 2 * kv_heads, dim)[:, :span]
        # What is chosen by number is copied, which takes about as long again as attending to it.
        seen = cells[:rows] if where.slots is None else cells.index_select(0, where.slots)
        keys, values = seen.transpose(1, 2).chunk(2, dim=1)
        query = turned[:, :heads].reshape(rows, -1, kv_heads, heads // kv_heads, dim).transpose(1, 2)
        query = query.reshape(rows, kv_heads, -1, dim)
        # Attention kernels give each key head of a session to one multiprocessor of a GPU's hundred. One session alone
        # is attended to sooner by a sum and a product, which spread over all.
        alone = rows == 1 and query.shape[-2] <= FEW_QUERIES
        attend = _products if alone else functional.scaled_dot_product_attention
        result = attend(query, keys, values, where.mask)
        result = result.view(rows, kv_heads, -1, heads // kv_heads, dim).transpose(1, 2)
        return result.reshape(-1, heads * dim)

    def _rotated(self, heads: torch.Tensor, where: CacheCells) -> torch.Tensor:
        """Turn (rows, heads, head_dim) in float32; dimensions that turn together lie side by side."""
        if self.head_norm is not None:
            heads = functional.rms_norm(heads, [heads.shape[-1]], None, self.shape.epsilon) * self.head_norm
        first, second = heads.float().unflatten(-1, (-1, 2)).unbind(-1)
        pairs = (first * where.cos - second * where.sin, first * where.sin + second * where.cos)
        return torch.stack(pairs, dim=-1).flatten(-2).to(heads.dtype)


def _products(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As scaled_dot_product_attention; scores in float32, as kernels for attention have them."""
    scale: float = query.shape[-1] ** -0.5
    scores = (query.float().unsqueeze(-2) * keys.float().unsqueeze(-3)).sum(-1) * scale
    return (scores + mask).softmax(-1).to(values.dtype) @ values


class StaticDecoder(nn.Module):
    """The whole forward for one bucket."""

    embedding: torch.Tensor
    norm: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, shape: DecoderShape, model: Model, slots: int, context: int, taps: Sequence[int] = ()) -> None:
        """slots: the spare one is the last of them. taps: as `specwire.lm.runners.decoder.Decoder`."""
        super().__init__()
        self.shape, self.taps, self.spare = shape, tuple(taps), slots - 1
        self.register_buffer("embedding", model.embedding)
        self.register_buffer("norm", model.norm)
        self.register_buffer("cos", model.rotations.real.contiguous())
        self.register_buffer("sin", model.rotations.imag.contiguous())
        self.layers = nn.ModuleList(StaticLayer(shape, layer, slots, context) for layer in model.layers)
        self.head = StaticLinear(model.head)

    def forward(
        self, fed: torch.Tensor, span: int, run: Callable[..., torch.Tensor] = StaticLayer.forward
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits (B x M, vocabulary) in the model's dtype; `fed`: see `packed`. run: of a layer, compiled or not.

        And the residual streams that are tapped, side by side (B x M, taps x hidden); None where none is.
        """
        tokens, positions, places, slots = fed.unbind(0)
        where = CacheCells(
            places.flatten(),
            None if len(slots) == self.spare else slots[:, 0].contiguous(),
            self.cos[positions.flatten()].unsqueeze(1),
            self.sin[positions.flatten()].unsqueeze(1),
            self._mask(positions, span),
        )
        x = functional.embedding(tokens.flatten(), self.embedding)
        streams: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in self.taps:
                streams[index] = x
            x = run(layer, x, where)
        streams[len(self.layers)] = x
        logits: torch.Tensor = self.head(functional.rms_norm(x, [x.shape[-1]], self.norm, self.shape.epsilon))
        return logits, torch.cat([streams[tap] for tap in self.taps], dim=-1) if self.taps else None

    def _mask(self, positions: torch.Tensor, span: int) -> torch.Tensor:
        """Additive (B, 1, M x group, L): position p sees [0, p]."""
        hidden = torch.arange(span, device=positions.device) > positions.unsqueeze(-1)
        mask = torch.zeros(hidden.shape, dtype=self.embedding.dtype, device=positions.device)
        mask = mask.masked_fill(hidden, float("-inf"))
        return mask.repeat_interleave(self.shape.heads // self.shape.kv_heads, dim=1).unsqueeze(1)


def packed(feeds: Sequence[Feed], bucket: Bucket, context: int, spare: int) -> torch.Tensor:
    """Integers (4, rows, columns): token, position, place in the cache, and slot, of every position fed.

    Each feed is filled up at its end, and so are rows without one, with the first position of the slot `spare`.
    """
    by_row = dict(zip(_rows(feeds, bucket, spare), feeds, strict=True))
    kinds: tuple[list[int], list[int], list[int], list[int]] = ([], [], [], [])
    for row in range(bucket.rows):
        feed = by_row.get(row)
        slot, tokens, start = (spare, (), 0) if feed is None else (feed.slot, feed.tokens, feed.start)
        positions, filling = range(start, start + len(tokens)), [0] * (bucket.columns - len(tokens))
        places = [slot * context + at for at in positions] + [spare * context for _ in filling]
        cells = ([*tokens, *filling], [*positions, *filling], places, [slot] * bucket.columns)
        for kind, values in zip(kinds, cells, strict=True):
            kind += values
    return torch.tensor(kinds).view(4, bucket.rows, bucket.columns)


def _rows(feeds: Sequence[Feed], bucket: Bucket, spare: int) -> Sequence[int]:
    """The row of each feed: its slot's number, where there is a row for each slot, or its own."""
    return [feed.slot for feed in feeds] if bucket.rows == spare else range(len(feeds))


class Recording(NamedTuple):
    """A bucket's forward as a CUDA graph: it reads `fed`, and writes what `StaticDecoder` returns."""

    graph: torch.cuda.CUDAGraph
    fed: torch.Tensor
    logits: torch.Tensor
    tapped: torch.Tensor | None


def _by_slot(feeds: Sequence[Feed], rows: torch.Tensor, counts: list[int]) -> dict[int, torch.Tensor]:
    return {feed.slot: part for feed, part in zip(feeds, rows.split(counts), strict=True)}


def _aligned(positions: int) -> int:
    return -(-positions // ALIGNED_CELLS) * ALIGNED_CELLS


class CompiledRunner(Runner):
    """`Runner` with weights from a Hugging Face model of the Llama family, compiled for `buckets`."""

    def __init__(
        self,
        model: CausalModel,
        slots: int,
        context: int,
        vocabulary: int,
        buckets: Buckets | None = None,
        backend: str | Backend | None = None,
        taps: Sequence[int] = (),
    ) -> None:
        """Compile, which takes some seconds for each bucket. Raises Unsuited as `LlamaRunner` does.

        taps: as `specwire.lm.runners.decoder.Decoder`.
        """
        shape = shape_of(model)
        self.buckets = buckets or Buckets.usual(slots, context)
        self._room, self._spare = _aligned(context), slots
        weights = model_of(model, shape, context, vocabulary)
        self.decoder = StaticDecoder(shape, weights, slots + 1, self._room, taps).eval()
        self._device = self.decoder.embedding.device
        self.taps, self.tapped = taps, self.decoder.embedding.new_empty(0)
        self._layer = torch.compile(StaticLayer.forward, backend=backend or BACKEND, dynamic=False, fullgraph=True)
        self._recordings: dict[Bucket, Recording] = {}
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
        fed = packed(feeds, bucket, self._room, self._spare)
        logits, tapped = self._forward(fed, bucket, compiled)
        wanted = self._last(feeds, bucket, [max(feed.wanted, 1) for feed in feeds])
        if tapped is None or not self.tapping:
            return logits[wanted], None
        return logits[wanted], tapped[self._last(feeds, bucket, [len(feed.tokens) for feed in feeds])]

    def _forward(self, fed: torch.Tensor, bucket: Bucket, compiled: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`StaticDecoder.forward`; through the bucket's recording where there is one."""
        recording = self._recordings.get(bucket) if compiled else None
        if recording is None:
            run = self._layer if compiled else StaticLayer.forward
            logits, tapped = self.decoder(fed.to(self._device), _aligned(bucket.span), run)
            return logits, tapped
        with torch.cuda.device(self._device):
            recording.fed.copy_(fed)
            recording.graph.replay()
        return recording.logits, recording.tapped

    def _last(self, feeds: Sequence[Feed], bucket: Bucket, counts: Sequence[int]) -> torch.Tensor:
        """Rows of the forward that are of the last so many tokens of each feed."""
        rows = [
            row * bucket.columns + column
            for row, feed, count in zip(_rows(feeds, bucket, self._spare), feeds, counts, strict=True)
            for column in range(len(feed.tokens) - count, len(feed.tokens))
        ]
        return torch.tensor(rows, dtype=torch.long, device=self._device)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Every bucket, of padding only; widest first, for the memory that they share."""
        limits = torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS, accumulated_recompile_limit=MOST_GRAPHS)
        pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        with limits, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of PyTorch, by what its compiler imports
            for bucket in reversed(self.buckets.all()):
                for _ in range(WARM_UPS):
                    self._compute([], bucket)
                if pool is not None:
                    self._recordings[bucket] = self._record(bucket, pool)

    def _record(self, bucket: Bucket, pool: Any) -> Recording:
        """pool: memory that recordings share, since one at a time is replayed; what each returns it keeps to itself."""
        with torch.cuda.device(self._device):
            fed = packed([], bucket, self._room, self._spare).to(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits, tapped = self.decoder(fed, _aligned(bucket.span), self._layer)
        return Recording(graph, fed, logits, tapped)
