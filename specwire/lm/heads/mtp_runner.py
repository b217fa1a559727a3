"""MTP layers over the slots of their target: each with keys and values of its own, as one TorchScript call."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from specwire.core.model import Feed
from specwire.lm.heads.head import HeadStep, SteppedHead
from specwire.lm.heads.layer import HeadCache, HeadLayers
from specwire.lm.heads.mtp import Mtp, MtpLayer
from specwire.lm.runners.decoder import AttentionBatch, DecoderShape, Layer, Model, compiled
from specwire.lm.runners.linear import LinearWeights, PlainLinear, pack_rounded
from specwire.lm.runners.llama import fused, pair_order, pairwise


class Shared(NamedTuple):
    """What the layers have of their target. norm: its final one. rotations: as `runners.decoder.Model`."""

    embedding: torch.Tensor
    norm: torch.Tensor
    output: LinearWeights
    rotations: torch.Tensor


class MtpLayers(HeadLayers):
    """norms: of each layer those of a decoder layer, the target's, and of each layer the embedding's, the state's and
    the last one.
    """

    # As in `DecoderLayers`.
    fuse_biases: list[torch.Tensor | None]
    gate_weights: list[torch.Tensor]
    gate_biases: list[torch.Tensor | None]

    def __init__(self, mtp: Mtp, shape: DecoderShape, model: Model, cache: torch.Tensor) -> None:
        super().__init__(shape, model, cache)
        self.state_first, self.normed_states = mtp.style.state_first, mtp.style.normed
        for layer in mtp.layers:
            self.norms += [layer.embedding_norm, layer.state_norm, layer.norm]
        self.fusing, packed = pack_rounded([layer.fuse for layer in mtp.layers])
        self.fuse_weights, self.fuse_biases = [part.weight for part in packed], [part.bias for part in packed]
        gates = [layer.gate for layer in mtp.layers if layer.gate is not None]
        self.gated = len(gates) > 0
        self.gating, packed = pack_rounded(gates) if gates else (PlainLinear(), [])
        self.gate_weights, self.gate_biases = [part.weight for part in packed], [part.bias for part in packed]

    def forward(
        self,
        layer: int,
        states: torch.Tensor,
        tokens: list[int],
        slots: list[int],
        starts: list[int],
        counts: list[int],
        batch: AttentionBatch,
        target: bool,
        telling: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States (tokens, hidden) of a layer, and where `telling` logits of the last token of each feed.

        states: (tokens, hidden), of the `target` before its final norm or of a layer. The others are as in
        `Decoder.forward`.
        """
        if target and self.normed_states:
            states = self._normed(2 * self.layers, states)
        own = 2 * self.layers + 1 + 3 * layer
        ids = torch.tensor(tokens, dtype=torch.long, device=states.device)
        embedded = self._normed(own, functional.embedding(ids, self.embedding))
        states = self._normed(own + 1, states)
        parts = [states, embedded] if self.state_first else [embedded, states]
        x = self.fusing(torch.cat(parts, dim=-1), self.fuse_weights[layer], self.fuse_biases[layer])
        rotation = self._rotation(starts, counts)
        masks = self._masks(starts, counts, batch)
        normed = self._normed(2 * layer, x)
        found = self._gathered(layer, normed, rotation, slots, starts, counts, masks, batch)
        if self.gated:
            found = found * torch.sigmoid(self.gating(normed, self.gate_weights[layer], self.gate_biases[layer]))
        x = x + self._multiply(4 * layer + 1, found)
        x = self._normed(own + 2, x + self._fed_forward(layer, x))
        logits = x.new_empty(0)
        if telling:
            logits = self._multiply(4 * self.layers, self._last(x, counts))
        return x, logits


class MtpRunner(HeadCache, SteppedHead):
    """A `Head`: MTP layers over `slots` texts.

    Layer k's row t is of the token at t + k + 1. So behind a text that ends with the token at T - 1 layer 0 has rows to
    T - 2, and layer k to T - 2 - k; those that it lacks up to T - 2 are of tokens that are drafted, and are computed
    when they are. For that the states of all layers but the last are kept as keys and values are.
    """

    def __init__(self, mtp: Mtp, shared: Shared, slots: int, context: int, dtype: torch.dtype) -> None:
        config, count = mtp.config, len(mtp.layers)
        device = shared.embedding.device
        shape = DecoderShape(count, config.heads, config.key_heads, config.head_dim, config.eps)
        super().__init__(shape, slots, context, dtype, device)
        self.width = config.hidden
        self._states = torch.zeros(count - 1, slots, context, config.hidden, dtype=dtype, device=device)
        self._drafted: list[list[int]] = [[] for _ in range(slots)]
        self._deepest = count - 1
        mtp = placed(mtp, dtype, device)
        self._decode: Any = compiled(MtpLayers(mtp, shape, model_of(mtp, shared, dtype), self.cache))
        self.target_ids = torch.arange(len(shared.output.weight), device=device)

    def read(self, feeds: Sequence[Feed], features: torch.Tensor) -> HeadStep:
        for feed in feeds:
            self._drafted[feed.slot] = []
        step = self._run(0, feeds, features, target=True)
        for layer in range(1, self._deepest + 1):
            fed = [_before(feed, layer) for feed in feeds if feed.stop > layer]
            if fed:
                self._run(layer, fed, self._kept(layer - 1, fed), telling=False)
        return step

    def follow(self, feeds: Sequence[Feed], states: torch.Tensor, depth: int) -> HeadStep:
        for feed in feeds:
            self._drafted[feed.slot].append(feed.tokens[0])
        if depth > self._deepest:
            fed = [feed._replace(start=feed.start - self._deepest) for feed in feeds]
            return self._run(self._deepest, fed, states)
        fed = [self._again(feed, depth) for feed in feeds]
        return self._run(depth, fed, self._kept(depth - 1, fed))

    def _again(self, feed: Feed, depth: int) -> Feed:
        """All rows of layer `depth` that are of drafted tokens, of which `feed` has the last."""
        stop = feed.stop - depth
        start = max(0, stop - depth)
        return Feed(feed.slot, start, self._drafted[feed.slot][start - stop :], 1)

    def _kept(self, layer: int, feeds: Sequence[Feed]) -> torch.Tensor:
        return torch.cat([self._states[layer, feed.slot, feed.start : feed.stop] for feed in feeds])

    def _run(
        self, layer: int, feeds: Sequence[Feed], states: torch.Tensor, *, target: bool = False, telling: bool = True
    ) -> HeadStep:
        states = states.to(self.cache.device, self.cache.dtype)
        found, logits = self._decode(layer, states, *self.rows(feeds), target, telling)
        ends, end = list[int](), 0
        for feed in feeds:
            if layer < self._deepest:
                self._states[layer, feed.slot, feed.start : feed.stop] = found[end : end + len(feed.tokens)]
            end += len(feed.tokens)
            ends.append(end - 1)
        return HeadStep(found[ends], logits)

    def zero(self, slot: int, stop: int) -> None:
        super().zero(slot, stop)
        self._states[:, slot, :stop].zero_()

    def copy(self, source: int, target: int, stop: int) -> None:
        super().copy(source, target, stop)
        self._states[:, target, :stop].copy_(self._states[:, source, :stop])

    @property
    def kv_bytes(self) -> int:
        return self.cache.nbytes + self._states.nbytes


def _before(feed: Feed, layer: int) -> Feed:
    """Where layer `layer` has the same tokens, but for those before its first row."""
    start, stop = max(0, feed.start - layer), feed.stop - layer
    return Feed(feed.slot, start, feed.tokens[start - stop :], 1)


def placed(mtp: Mtp, dtype: torch.dtype, device: torch.device) -> Mtp:
    """On a device."""

    def part_of(part: Any) -> Any:
        if isinstance(part, LinearWeights):
            bias = None if part.bias is None else part.bias.to(device, dtype)
            return LinearWeights(part.weight.to(device, dtype), bias)
        if isinstance(part, tuple):
            return tuple(part_of(each) for each in part)
        return part if part is None else part.to(device, dtype)

    return mtp._replace(layers=[MtpLayer(*(part_of(part) for part in layer)) for layer in mtp.layers])


def model_of(mtp: Mtp, shared: Shared, dtype: torch.dtype) -> Model:
    """Of layers that are placed. norm: the target's."""
    output = shared.output
    return Model(
        shared.embedding.to(dtype),
        [_decoder_layer(mtp, layer) for layer in mtp.layers],
        shared.norm.to(dtype),
        LinearWeights(output.weight.to(dtype), None if output.bias is None else output.bias.to(dtype)),
        shared.rotations.to(shared.embedding.device),
    )


def _decoder_layer(mtp: Mtp, layer: MtpLayer) -> Layer:
    config = mtp.config
    q, k = (pairwise(part, config.head_dim, config.turned) for part in (layer.q, layer.k))
    head_norm = None
    if layer.head_norms is not None:
        order = pair_order(config.head_dim, config.turned)
        counts = (config.heads, config.key_heads)
        head_norm = torch.cat([norm[order].expand(n, -1) for norm, n in zip(layer.head_norms, counts, strict=True)])
    return Layer(
        layer.attention_norm,
        fused(q, k, layer.v),
        head_norm,
        layer.output,
        layer.mlp_norm,
        fused(layer.mlp_gate, layer.up),
        layer.down,
    )
