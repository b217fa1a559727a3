"""A decoder of the Llama family as one TorchScript call: the same arithmetic in few dispatches."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from specwire.core.model import Feed, TreeFeed
from specwire.lm.linear import LinearWeights, pack

# ----------------------------------------------------------------------------------------------------------------------
# One attention for several short feeds, so that the dozen small operations of an attention are paid once for all
# sessions. Slots that lie side by side are one stretch of the cache. It is read in place, from every slot as many
# positions as the longest text has, and a mask hides what lies behind each row's own position, or beside it in a tree.
# Where slots lie far apart, or one text is much longer than the others, that would read more than it saves; then each
# feed has an attention of its own.

LEAST_FEEDS = 2
# Tokens of a feed: windows, and the ends of prompts.
MOST_COLUMNS = 32
# Positions that are read, as a multiple of those that there are.
MOST_WASTE = 4


class AttentionBatch(NamedTuple):
    """The first `feeds` of a forward, which have `rows` tokens, in B slots from `first` on; M columns, L positions.

    places: (rows x 2 kv_heads,) where their keys and values go among a layer's (slots x 2 kv_heads x context) vectors.
    cells: (rows,) where each row stands among B x M. mask: additive (B, 1, M x group, L), each column `group` times.
    """

    feeds: int
    rows: int
    first: int
    slots: int
    columns: int
    span: int
    places: torch.Tensor
    cells: torch.Tensor
    mask: torch.Tensor
    straight: bool


class Layout(NamedTuple):
    """Shape of a cache (layers, slots, 2 kv_heads, context, head_dim). kv: 2 kv_heads; group: queries per key head."""

    kv: int
    context: int
    group: int
    dtype: torch.dtype
    device: torch.device


@cache
def nothing(layout: Layout) -> AttentionBatch:
    """No feed is computed together with another."""
    indices = torch.empty(0, dtype=torch.long, device=layout.device)
    mask = torch.empty(0, dtype=layout.dtype, device=layout.device)
    return AttentionBatch(0, 0, 0, 0, 0, 0, indices, indices, mask, True)


def leading(feeds: Sequence[Feed]) -> int:
    """How many of the first feeds, no two of one slot, should share one attention; 0 for none."""
    count = next((at for at, feed in enumerate(feeds) if len(feed.tokens) > MOST_COLUMNS), len(feeds))
    if count < LEAST_FEEDS:
        return 0
    slots, stops = [feed.slot for feed in feeds[:count]], [feed.stop for feed in feeds[:count]]
    read = (max(slots) - min(slots) + 1) * max(stops)
    return count if read <= MOST_WASTE * sum(stops) else 0


def batch_of(feeds: Sequence[Feed], layout: Layout) -> AttentionBatch:
    """The first feeds as one; see `leading`."""
    count = leading(feeds)
    if count == 0:
        return nothing(layout)
    chosen = feeds[:count]
    first = min(feed.slot for feed in chosen)
    slots = max(feed.slot for feed in chosen) - first + 1
    columns, span = max(len(feed.tokens) for feed in chosen), max(feed.stop for feed in chosen)
    at = [(feed, index) for feed in chosen for index in range(len(feed.tokens))]
    cells = [(feed.slot - first) * columns + index for feed, index in at]
    ends = [feed.start + index if feed.tree is None else feed.tree.trunk - 1 for feed, index in at]
    vectors = [feed.slot * layout.kv * layout.context + feed.start + index for feed, index in at]
    # Empty cells see position 0 of their slot and are dropped: a row that sees nothing would not be finite.
    last = [0] * (slots * columns)
    for cell, end in zip(cells, ends, strict=True):
        last[cell] = end
    hidden = torch.arange(span, device=layout.device) > torch.tensor(last, device=layout.device).view(slots, columns, 1)
    seen = [at for feed in chosen if feed.tree for at in _seen(feed, feed.tree, span, (feed.slot - first) * columns)]
    if seen:
        _show(hidden, seen)
    heads = torch.arange(layout.kv, device=layout.device) * layout.context
    return AttentionBatch(
        count,
        len(at),
        first,
        slots,
        columns,
        span,
        (torch.tensor(vectors, device=layout.device).unsqueeze(1) + heads).flatten(),
        torch.tensor(cells, device=layout.device),
        _additive(hidden, layout).unsqueeze(1),
        cells == list(range(slots * columns)),
    )


def _additive(hidden: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The mask (..., M x group, L) that hides these (..., M, L)."""
    mask = torch.zeros(hidden.shape, dtype=layout.dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
    return mask.repeat_interleave(layout.group, dim=-2)


# ----------------------------------------------------------------------------------------------------------------------
# Feeds with a tree: rows lie in the order in which they were fed. Each is turned by its depth, not by its row, and sees
# of those behind the text its ancestors alone.


class TreeRows(NamedTuple):
    """positions: (rows,) of all rows of a forward.

    masks: additive (count x group, stop), as `Decoder._mask`, of each feed behind the batch; empty for one without a
    tree.
    """

    positions: torch.Tensor
    masks: list[torch.Tensor]


def tree_rows(feeds: Sequence[Feed], batched: int, layout: Layout) -> TreeRows:
    """What tells the rows of these feeds from lines; the first `batched` have one attention."""
    positions = [position for feed in feeds for position in feed.positions]
    masks = [_tree_mask(feed, feed.tree, layout) for feed in feeds[batched:]]
    return TreeRows(torch.tensor(positions, device=layout.device), masks)


def _tree_mask(feed: Feed, tree: TreeFeed | None, layout: Layout) -> torch.Tensor:
    if tree is None:
        return torch.empty(0, dtype=layout.dtype, device=layout.device)
    size = (len(feed.tokens), feed.stop)
    mask = torch.full(size, float("-inf"), dtype=layout.dtype, device=layout.device)
    mask[:, : tree.trunk] = 0.0
    _show(mask, list(_seen(feed, tree, feed.stop)))
    return mask.repeat_interleave(layout.group, dim=0)


def _seen(feed: Feed, tree: TreeFeed, span: int, first: int = 0) -> Iterator[int]:
    """Where in (cells, span) the ancestors of each token are, and itself; the first token's cell is `first`."""
    for index, ancestors in enumerate(tree.ancestors):
        begin = (first + index) * span
        yield from (begin + row for row in ancestors)
        yield begin + feed.start + index


def _show(mask: torch.Tensor, cells: Sequence[int]) -> None:
    """Uncover these cells of a mask: what is 0, or False, is seen."""
    mask.view(-1).index_fill_(0, torch.tensor(cells, device=mask.device), 0)


# ----------------------------------------------------------------------------------------------------------------------
# A decoder of the Llama family as one TorchScript call: the same arithmetic in few dispatches, none of them Python's.
#
# At batch 1 on a CPU most of an eager forward is dispatch and a BLAS that is slow at a few rows. Here each layer is
# four matrix products, one attention for all short feeds (above), one for each of the others over its valid positions
# only, and a dozen small operations. The call releases the interpreter's lock, so the thread that sends the last step's
# verdicts runs beside it; with a hundred Python calls the two would wait for each other (measured; see docs/LOG.md).

logger = logging.getLogger(__name__)


class DecoderShape(NamedTuple):
    """Sizes shared by all layers."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float


class Layer(NamedTuple):
    """Weights of one decoder layer. Rows of q and k that are rotated together lie side by side."""

    attention_norm: torch.Tensor
    qkv: LinearWeights
    head_norm: torch.Tensor | None  # (heads + kv_heads, head_dim) for Qwen3
    output: LinearWeights
    mlp_norm: torch.Tensor
    gate_up: LinearWeights
    down: LinearWeights


class Model(NamedTuple):
    """Weights of a decoder, and the rotation cos + i sin of every position, complex64 (context, head_dim / 2)."""

    embedding: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor
    head: LinearWeights
    rotations: torch.Tensor


class FedRows(NamedTuple):
    """Feed i is the next counts[i] tokens, at positions starts[i] and on of slot slots[i]; the first are a `batch`."""

    slots: list[int]
    starts: list[int]
    counts: list[int]
    batch: AttentionBatch


def fed_rows(feeds: Sequence[Feed], batch: AttentionBatch) -> FedRows:
    """What a forward is told of these feeds beside their tokens."""
    slots, starts = [feed.slot for feed in feeds], [feed.start for feed in feeds]
    return FedRows(slots, starts, [len(feed.tokens) for feed in feeds], batch)


class Placing(NamedTuple):
    """rotation: of every row (rows, 1, head_dim / 2). masks: of the feeds behind the batch."""

    rotation: torch.Tensor
    masks: list[torch.Tensor]


class DecoderLayers(nn.Module):
    """Layers that write keys and values of several feeds to `cache` (layers, slots, 2 kv_heads, context, dim)."""

    # Types that TorchScript cannot infer from an empty list, or from a list of None.
    head_norms: list[torch.Tensor]
    biases: list[torch.Tensor | None]

    def __init__(
        self,
        shape: DecoderShape,
        model: Model,
        cache: torch.Tensor,
        apart: bool = False,
        packing: Callable[[Sequence[LinearWeights]], tuple[nn.Module, list[LinearWeights]]] = pack,
    ) -> None:
        """apart: nothing but matrix products is computed for several rows at once (`runners.deterministic`).

        packing: see `specwire.lm.linear`.
        """
        super().__init__()
        self.apart = apart
        self.layers, self.heads, self.kv_heads, self.head_dim, self.epsilon = shape
        self.every = list(range(shape.layers))
        self.cache = cache
        self.embedding, self.rotations = model.embedding, model.rotations
        self.norms = [norm for layer in model.layers for norm in (layer.attention_norm, layer.mlp_norm)]
        self.norms.append(model.norm)
        self.head_norms = [layer.head_norm for layer in model.layers if layer.head_norm is not None]
        linears = [part for layer in model.layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        self.linear, packed = packing([*linears, model.head])
        self.weights = [part.weight for part in packed]
        self.biases = [part.bias for part in packed]

    def _masks(self, fed: FedRows) -> list[torch.Tensor]:
        """Of the feeds behind the batch."""
        masks: list[torch.Tensor] = []
        for feed in range(fed.batch.feeds, len(fed.starts)):
            masks.append(self._mask(fed.starts[feed], fed.counts[feed]))
        return masks

    def _lines(self, fed: FedRows) -> Placing:
        """Of feeds without trees."""
        parts: list[torch.Tensor] = []
        for feed in range(len(fed.starts)):
            parts.append(self.rotations.narrow(0, fed.starts[feed], fed.counts[feed]))
        return Placing(torch.cat(parts).unsqueeze(1), self._masks(fed))

    def _mask(self, start: int, count: int) -> torch.Tensor:
        """Additive (count x group, start + count): row i sees positions [0, start + i], and so do its `group` queries.

        Empty for a single row, which sees everything.
        """
        if count == 1:
            return torch.empty(0, dtype=self.cache.dtype, device=self.cache.device)
        mask = torch.zeros(count, start + count, dtype=self.cache.dtype, device=self.cache.device)
        future = torch.full((count, count), float("-inf"), dtype=mask.dtype, device=mask.device).triu_(1)
        mask.narrow(1, start, count).copy_(future)
        return mask.repeat_interleave(self.heads // self.kv_heads, dim=0)

    def _layer(self, layer: int, x: torch.Tensor, fed: FedRows, placing: Placing) -> torch.Tensor:
        """Map x (rows, hidden) to (rows, hidden)."""
        x = x + self._attention(layer, self._normed(2 * layer, x), fed, placing)
        return x + self._fed_forward(layer, x)

    def _attention(self, layer: int, x: torch.Tensor, fed: FedRows, placing: Placing) -> torch.Tensor:
        """What attention adds to the residual stream (rows, hidden), from normed x (rows, any)."""
        return self._multiply(4 * layer + 1, self._gathered(layer, x, fed, placing))

    def _gathered(self, layer: int, x: torch.Tensor, fed: FedRows, placing: Placing) -> torch.Tensor:
        """Attention's result for every row (rows, heads x head_dim), before its output layer."""
        heads = self._multiply(4 * layer, x).view(x.size(0), -1, self.head_dim)
        heads = self._turned(layer, heads, placing.rotation)
        queries = heads.narrow(1, 0, self.heads).to(x.dtype)
        fresh = heads.narrow(1, self.heads, 2 * self.kv_heads)
        parts: list[torch.Tensor] = []
        batch, begin = fed.batch, fed.batch.rows
        if batch.feeds > 0:
            parts.append(self._attended_together(layer, queries.narrow(0, 0, begin), fresh.narrow(0, 0, begin), batch))
        fresh = fresh.transpose(0, 1)
        for feed in range(batch.feeds, len(fed.slots)):
            start, count = fed.starts[feed], fed.counts[feed]
            cache = self.cache[layer, fed.slots[feed]]
            cache.narrow(1, start, count).copy_(fresh.narrow(1, begin, count))
            seen = cache.narrow(1, 0, start + count)
            parts.append(self._attended(queries.narrow(0, begin, count), seen, placing.masks[feed - batch.feeds]))
            begin += count
        return torch.cat(parts)

    def _fed_forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """What the gated layers add to the residual stream x (rows, hidden)."""
        gate, up = self._multiply(4 * layer + 2, self._normed(2 * layer + 1, x)).chunk(2, dim=-1)
        return self._multiply(4 * layer + 3, self._activated(gate).mul_(up))

    def _activated(self, gate: torch.Tensor) -> torch.Tensor:
        if not self.apart:
            return functional.silu(gate)
        parts: list[torch.Tensor] = []
        for row in range(gate.size(0)):
            parts.append(functional.silu(gate.narrow(0, row, 1)))
        return torch.cat(parts)

    def _turned(self, layer: int, heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        if not self.apart:
            return self._rotated(layer, heads, rotation)
        parts: list[torch.Tensor] = []
        for row in range(heads.size(0)):
            parts.append(self._rotated(layer, heads.narrow(0, row, 1), rotation.narrow(0, row, 1)))
        return torch.cat(parts)

    def _rotated(self, layer: int, heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Turn queries and keys (rows, heads + 2 kv_heads, head_dim) by their positions, in float32; values pass."""
        turned = self.heads + self.kv_heads
        if len(self.head_norms) > 0:
            normed = functional.rms_norm(heads.narrow(1, 0, turned), [self.head_dim], None, self.epsilon)
            heads = torch.cat((normed.mul_(self.head_norms[layer]), heads.narrow(1, turned, self.kv_heads)), dim=1)
        heads = heads.float()
        pairs = heads.narrow(1, 0, turned).view(heads.size(0), turned, -1, 2)
        torch.view_as_complex(pairs).mul_(rotation)
        return heads

    def _attended(self, queries: torch.Tensor, seen: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attention's result (rows, heads x head_dim) of queries (rows, heads, head_dim) over one feed's positions.

        Queries that share a key head are rows of one attention: keys are neither repeated nor copied.
        """
        rows = queries.size(0)
        query = queries.view(rows, self.kv_heads, -1, self.head_dim).transpose(0, 1)
        query = query.reshape(1, self.kv_heads, -1, self.head_dim)
        keys = seen.narrow(0, 0, self.kv_heads).unsqueeze(0)
        values = seen.narrow(0, self.kv_heads, self.kv_heads).unsqueeze(0)
        additive: torch.Tensor | None = None
        if mask.numel() > 0:
            additive = mask
        result = functional.scaled_dot_product_attention(query, keys, values, additive)
        result = result.view(self.kv_heads, rows, -1, self.head_dim).transpose(0, 1)
        return result.reshape(rows, self.heads * self.head_dim)

    def _attended_together(
        self, layer: int, queries: torch.Tensor, fresh: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """File keys and values `fresh` (rows, 2 kv_heads, head_dim) of the batch; attention's result as `_attended`."""
        cache = self.cache[layer]
        vectors = fresh.to(cache.dtype).reshape(-1, self.head_dim)
        cache.view(-1, self.head_dim).index_copy_(0, batch.places, vectors)
        cells = batch.slots * batch.columns
        if not batch.straight:
            queries = queries.new_zeros([cells, self.heads, self.head_dim]).index_copy_(0, batch.cells, queries)
        query = queries.view(batch.slots, batch.columns, self.kv_heads, -1, self.head_dim).transpose(1, 2)
        query = query.reshape(batch.slots, self.kv_heads, -1, self.head_dim)
        seen = cache.narrow(0, batch.first, batch.slots).narrow(2, 0, batch.span)
        keys, values = seen.narrow(1, 0, self.kv_heads), seen.narrow(1, self.kv_heads, self.kv_heads)
        result = functional.scaled_dot_product_attention(query, keys, values, batch.mask)
        result = result.view(batch.slots, self.kv_heads, batch.columns, -1, self.head_dim).transpose(1, 2)
        rows = result.reshape(cells, self.heads * self.head_dim)
        return rows if batch.straight else rows.index_select(0, batch.cells)

    def _normed(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """RMS norm of each row: x / sqrt(mean of squares + epsilon), times a weight."""
        size, weight = [x.size(-1)], self.norms[index]
        if not self.apart:
            return functional.rms_norm(x, size, weight, self.epsilon)
        parts: list[torch.Tensor] = []
        for row in range(x.size(0)):
            parts.append(functional.rms_norm(x.narrow(0, row, 1), size, weight, self.epsilon))
        return torch.cat(parts)

    @torch.jit.unused
    def products(self) -> tuple[nn.Module, list[LinearWeights], torch.dtype]:
        """How rows are multiplied with which layers, and the rows' dtype."""
        layers = [LinearWeights(*each) for each in zip(self.weights, self.biases, strict=True)]
        return self.linear, layers, self.embedding.dtype

    def _multiply(self, index: int, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x, self.weights[index], self.biases[index])
        return y


class Decoder(DecoderLayers):
    """Forward over several feeds."""

    def forward(
        self, tokens: list[int], fed: FedRows, wanted: list[int], taps: list[int], kept: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (sum of wanted, width) of the last `wanted` tokens of each feed, in the model's dtype.

        And the residual streams that enter the layers `taps`, side by side (tokens, taps x hidden); the number of
        layers stands for what leaves the last one. Empty where nothing is tapped.

        kept: the layers that are run, in their order, the others left out, of keys and values too; none for all. Then
        nothing may be tapped.

        Trees have a way of their own (`branched`): where one way takes both, lines are slower in a service (LOG).
        """
        return self._decoded(tokens, fed, wanted, self._lines(fed), taps, kept)

    @torch.jit.export
    def branched(
        self, tokens: list[int], fed: FedRows, wanted: list[int], trees: TreeRows, taps: list[int], kept: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, of feeds some of which have `trees`: their starts are rows, and positions are told."""
        masks = self._masks(fed)
        for own, mask in enumerate(trees.masks):
            if mask.numel() > 0:
                masks[own] = mask
        rotation = self.rotations.index_select(0, trees.positions).unsqueeze(1)
        return self._decoded(tokens, fed, wanted, Placing(rotation, masks), taps, kept)

    def _decoded(
        self, tokens: list[int], fed: FedRows, wanted: list[int], placing: Placing, taps: list[int], kept: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `forward`."""
        device = self.embedding.device
        x = functional.embedding(torch.tensor(tokens, dtype=torch.long, device=device), self.embedding)
        streams: list[torch.Tensor] = []
        for layer in kept if len(kept) > 0 else self.every:
            if len(taps) > 0:
                streams.append(x)
            x = self._layer(layer, x, fed, placing)
        streams.append(x)
        tapped = x.new_empty(0)
        if len(taps) > 0:
            tapped = torch.cat([streams[tap] for tap in taps], dim=-1)
        rows: list[torch.Tensor] = []
        end = 0
        for feed in range(len(fed.slots)):
            end += fed.counts[feed]
            rows.append(x.narrow(0, end - wanted[feed], wanted[feed]))
        return self._multiply(4 * self.layers, self._normed(2 * self.layers, torch.cat(rows))), tapped


def compiled(decoder: DecoderLayers) -> Any:
    """The decoder as one TorchScript call; itself where PyTorch no longer compiles it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return torch.jit.script(decoder.eval())
        except (AttributeError, RuntimeError, NotImplementedError) as reason:
            logger.info("the decoder runs uncompiled: %s", reason)
            return decoder
