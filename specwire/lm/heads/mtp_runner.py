"""An MTP layer over the slots of its target: with keys and values of its own, as one TorchScript call."""

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

# In place of a gate, where there is none.
NO_GATE = LinearWeights(torch.empty(0), None)


class Shared(NamedTuple):
    """What the layer has of its target. norm: its final one. rotations: as `runners.decoder.Model`."""

    embedding: torch.Tensor
    norm: torch.Tensor
    output: LinearWeights
    rotations: torch.Tensor


class MtpDecoder(HeadLayers):
    """norms: of a decoder layer, the target's, the embedding's, the state's, and the last one."""

    def __init__(self, mtp: Mtp, shape: DecoderShape, model: Model, cache: torch.Tensor) -> None:
        super().__init__(shape, model, cache)
        self.state_first, self.normed_states = mtp.style.state_first, mtp.style.normed
        layer = mtp.layer
        self.norms += [layer.embedding_norm, layer.state_norm, layer.norm]
        self.fusing, (packed,) = pack_rounded([layer.fuse])
        self.fuse_weight, self.fuse_bias = packed
        self.gated = layer.gate is not None
        self.gating, (gate,) = (PlainLinear(), [NO_GATE]) if layer.gate is None else pack_rounded([layer.gate])
        self.gate_weight, self.gate_bias = gate

    def forward(
        self,
        states: torch.Tensor,
        tokens: list[int],
        slots: list[int],
        starts: list[int],
        counts: list[int],
        batch: AttentionBatch,
        target: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the last token of each feed leads to: states (feeds, hidden), and logits (feeds, vocabulary).

        states: (tokens, hidden), of the `target` before its final norm or of the step before. The others are as in
        `Decoder.forward`.
        """
        if target and self.normed_states:
            states = self._normed(2, states)
        ids = torch.tensor(tokens, dtype=torch.long, device=states.device)
        embedded = self._normed(3, functional.embedding(ids, self.embedding))
        states = self._normed(4, states)
        parts = [states, embedded] if self.state_first else [embedded, states]
        x = self.fusing(torch.cat(parts, dim=-1), self.fuse_weight, self.fuse_bias)
        rotation = self._rotation(starts, counts)
        masks = self._masks(starts, counts, batch)
        normed = self._normed(0, x)
        found = self._gathered(0, normed, rotation, slots, starts, counts, masks, batch)
        if self.gated:
            found = found * torch.sigmoid(self.gating(normed, self.gate_weight, self.gate_bias))
        x = x + self._multiply(1, found)
        last = self._normed(5, self._last(x + self._fed_forward(0, x), counts))
        return last, self._multiply(4, last)


class MtpRunner(HeadCache, SteppedHead):
    """A `Head`: an MTP layer over `slots` texts. Its row t is of the token at t + 1."""

    def __init__(self, mtp: Mtp, shared: Shared, slots: int, context: int, dtype: torch.dtype) -> None:
        config, device = mtp.config, shared.embedding.device
        shape = DecoderShape(1, config.heads, config.key_heads, config.head_dim, config.eps)
        super().__init__(shape, slots, context, dtype, device)
        self.width = config.hidden
        mtp = placed(mtp, dtype, device)
        self._decode: Any = compiled(MtpDecoder(mtp, shape, model_of(mtp, shared, dtype), self.cache))
        self.target_ids = torch.arange(len(shared.output.weight), device=device)

    def read(self, feeds: Sequence[Feed], features: torch.Tensor) -> HeadStep:
        return self._run(feeds, features, target=True)

    def follow(self, feeds: Sequence[Feed], states: torch.Tensor, depth: int) -> HeadStep:
        return self._run(feeds, states, target=False)

    def _run(self, feeds: Sequence[Feed], states: torch.Tensor, target: bool) -> HeadStep:
        states = states.to(self.cache.device, self.cache.dtype)
        return HeadStep(*self._decode(states, *self.rows(feeds), target))


def placed(mtp: Mtp, dtype: torch.dtype, device: torch.device) -> Mtp:
    """On a device."""

    def part_of(part: Any) -> Any:
        if isinstance(part, LinearWeights):
            bias = None if part.bias is None else part.bias.to(device, dtype)
            return LinearWeights(part.weight.to(device, dtype), bias)
        if isinstance(part, tuple):
            return tuple(part_of(each) for each in part)
        return part if part is None else part.to(device, dtype)

    return mtp._replace(layer=MtpLayer(*(part_of(part) for part in mtp.layer)))


def model_of(mtp: Mtp, shared: Shared, dtype: torch.dtype) -> Model:
    """Of a layer that is placed. norm: the target's."""
    output = shared.output
    return Model(
        shared.embedding.to(dtype),
        [_decoder_layer(mtp)],
        shared.norm.to(dtype),
        LinearWeights(output.weight.to(dtype), None if output.bias is None else output.bias.to(dtype)),
        shared.rotations.to(shared.embedding.device),
    )


def _decoder_layer(mtp: Mtp) -> Layer:
    config, layer = mtp.config, mtp.layer
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
